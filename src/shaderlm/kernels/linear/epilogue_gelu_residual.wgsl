// What becomes of a sum y[n] = bias[n] + Σ_k x[tokens, k] · w[n, k]: gelu(y[n]) · residual[tokens, n].
// Exports the same functions as epilogue; no rows are pairs. Needs: bias, params, row_count and gate, which is gelu.

@group(0) @binding(0) var<storage, read> residual: array<f32>;     // [tokens, n_total]
@group(0) @binding(1) var<storage, read_write> out: array<f32>;    // [tokens, n_total]

// Bits of params.epilogue.
const BIAS: u32 = 1u;
const GATED: u32 = 4u;

fn has(part: u32) -> bool {
    return (params.epilogue & part) != 0u;
}

fn biased(n: u32, sum: f32) -> f32 {
    if (has(BIAS)) {
        return sum + bias[n];
    }
    return sum;
}

// What a result is multiplied by.
fn added_to(m: u32, n: u32) -> f32 {
    if (m < row_count() && n < params.n) {
        return residual[m * params.n_total + params.n_first + n];
    }
    return 0.0;
}

fn store_adding(m: u32, n: u32, sum: f32, added: f32) {
    if (m < row_count() && n < params.n) {
        out[m * params.n_total + params.n_first + n] = gate(biased(n, sum)) * added;
    }
}

fn store(m: u32, n: u32, sum: f32) {
    store_adding(m, n, sum, added_to(m, n));
}

fn store_pair(m: u32, n: u32, sum: f32, next: f32) {
    store(m, n, sum);
    store(m, n + 1u, next);
}
