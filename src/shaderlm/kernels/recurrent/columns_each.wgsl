// What a short convolution reads of a row, and what is stored: columns of x; the sum, and silu of it if SILU.
// Needs: x, params.first, params.stride; shared/silu. Exports: column_at(t, c), finished(t, c, sum).

const SILU: bool = false;

fn column_at(t: u32, c: u32) -> f32 {
    return x[t * params.stride + params.first + c];
}

fn finished(t: u32, c: u32, sum: f32) -> f32 {
    if (SILU) {
        return silu(sum);
    }
    return sum;
}
