// What becomes of four neighbouring sums of a row: the epilogue. Exports: finish(part, m, n, sums). Same function as
// finish_parts. Needs: the epilogue.

@group(0) @binding(0) var<storage, read> row_scale: array<f32>;  // [tokens], what the sums of a row are multiplied by
@group(0) @binding(1) var<storage, read> bias: array<f32>;       // [n] if there is one

fn finish(part: u32, m: u32, n: u32, sums: vec4<f32>) {
    if (m < row_count() && n < params.n) {
        let values = sums * row_scale[m];
        store_pair(m, n, values.x, values.y);
        store_pair(m, n + 2u, values.z, values.w);
    }
}
