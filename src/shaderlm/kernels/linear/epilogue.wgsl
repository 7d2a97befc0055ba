// What becomes of a sum y[n] = bias[n] + Σ_k x[tokens, k] · w[n, k]: residual[tokens, n] + plain(y[n]), or gate(y[n]) · y[n + 1]
// for even n. plain and gate are included: y and silu(y), or gelu(y) for both.
// Exports: store(m, n, sum) and store_pair(m, n, sum, next), next being that of n + 1; for kernels that ask for what is
// added before they have a sum, added_to(m, n) and store_adding(m, n, sum, added). n counts in the rows of this
// range of the weight; results past the end are dropped. GATED pairs even n with the next, and halves the row of out.
// Which of them is a parameter and not a constant: one compiled kernel then serves all three, and software adapters take
// a second to compile one.
// Needs: bias, params, row_count, plain and gate.

@group(0) @binding(0) var<storage, read> residual: array<f32>;     // [tokens, n_total] if there is one
@group(0) @binding(1) var<storage, read_write> out: array<f32>;    // [tokens, n_total]

// Bits of params.epilogue.
const BIAS: u32 = 1u;
const RESIDUAL: u32 = 2u;
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

// What is added to a result besides the bias.
fn added_to(m: u32, n: u32) -> f32 {
    if (has(RESIDUAL) && m < row_count() && n < params.n) {
        return residual[m * params.n_total + params.n_first + n];
    }
    return 0.0;
}

fn store_adding(m: u32, n: u32, sum: f32, added: f32) {
    if (m < row_count() && n < params.n) {
        out[m * params.n_total + params.n_first + n] = added + plain(biased(n, sum));
    }
}

fn store(m: u32, n: u32, sum: f32) {
    store_adding(m, n, sum, added_to(m, n));
}

fn store_pair(m: u32, n: u32, sum: f32, next: f32) {
    if (!has(GATED)) {
        store(m, n, sum);
        store(m, n + 1u, next);
    } else if (m < row_count() && n < params.n) {
        out[m * params.n_total + params.n_first + n / 2u] = gate(biased(n, sum)) * biased(n + 1u, next);
    }
}
