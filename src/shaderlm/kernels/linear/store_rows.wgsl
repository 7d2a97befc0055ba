// What the GEMV over 16 bits does with the sums of ROWS rows where the epilogue is that of the linears.
// Exports: begin(first), before the weights are multiplied, and store_rows(first, sums). Needs: store and store_pair.

fn begin(first: u32) {}

fn store_rows(first: u32, sums: vec4<f32>) {
    if (ROWS == 1u) {
        store(0u, first, sums.x);
    } else {
        store_pair(0u, first, sums.x, sums.y);
    }
    if (ROWS > 2u) {
        store_pair(0u, first + 2u, sums.z, sums.w);
    }
}
