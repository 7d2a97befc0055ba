// What becomes of four neighbouring sums over a part of k: linear_matrix_merge adds them up. Exports:
// finish(part, m, n, sums). Same function as finish_store. Needs: params, row_count.

@group(0) @binding(0) var<storage, read_write> parts: array<vec4<f32>>;  // [split, tokens, ceil(n / 4)]

fn finish(part: u32, m: u32, n: u32, sums: vec4<f32>) {
    if (m < row_count() && n < params.n) {
        parts[(part * params.tokens + m) * ((params.n + 3u) / 4u) + n / 4u] = sums;
    }
}
