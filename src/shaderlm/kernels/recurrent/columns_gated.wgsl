// What a short convolution reads of a row, and what is stored: products of columns of x, as in LFM2.
// Needs: x, params.stride, params.first, params.values_first, params.after_first. Exports: column_at(t, c), finished(t, c, sum).

fn column_at(t: u32, c: u32) -> f32 {
    let row = t * params.stride + c;
    return x[row + params.first] * x[row + params.values_first];
}

fn finished(t: u32, c: u32, sum: f32) -> f32 {
    return x[t * params.stride + params.after_first + c] * sum;
}
