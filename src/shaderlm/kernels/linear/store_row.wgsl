// What becomes of four neighbouring sums of a row: the epilogue. Exports: store_row(m, n, sums). Same function as
// experts/tiles_choices. Needs: the epilogue.

@group(0) @binding(0) var<storage, read> bias: array<f32>;  // [n] if there is one

fn store_row(m: u32, n: u32, sums: vec4<f32>) {
    store_pair(m, n, sums.x, sums.y);
    store_pair(m, n + 2u, sums.z, sums.w);
}
