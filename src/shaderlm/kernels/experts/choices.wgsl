// The chosen experts of a row (choice = t · used + j), and what becomes of a sum over k: y + bias, apply(even n, odd n) of it,
// or, if SUM, what is already the sum over the experts of a row, residual added. `apply` is included.
// Exports: has, SUM, matrix, share, biases, store_pair and store (at: a choice, or a row if SUM), alias value.
// Needs: params.n, params.used, params.experts, params.combine and row_count.

@group(0) @binding(0) var<storage, read> bias: array<f32>;         // [experts · n] if there is one
@group(0) @binding(1) var<storage, read> ids: array<u32>;          // [tokens, used]
@group(0) @binding(2) var<storage, read> factors: array<f32>;      // [tokens, used] if they count
@group(0) @binding(3) var<storage, read> residual: array<f32>;     // [tokens, n] if there is one
@group(0) @binding(4) var<storage, read_write> out: array<f32>;    // [tokens, used, n], [tokens, used, n / 2] or [tokens, n]

alias value = f32;

// Bits of params.combine.
const GATED: u32 = 1u;
const SUM: u32 = 2u;
const BIAS: u32 = 4u;
const RESIDUAL: u32 = 8u;

fn has(part: u32) -> bool {
    return (params.combine & part) != 0u;
}

// The first row of an expert's matrix. What is no expert is read as the last one.
fn matrix(choice: u32) -> u32 {
    return min(ids[choice], params.experts - 1u) * params.n;
}

fn share(choice: u32) -> f32 {
    if (has(SUM)) {
        return factors[choice];
    }
    return 1.0;
}

// The share of one lane in what the biases of `span` choices add to four columns; `lanes` lanes share the choices.
fn biases(first: u32, span: u32, lane: u32, lanes: u32, columns: vec4<u32>) -> vec4<f32> {
    var sum = vec4<f32>();
    if (has(BIAS)) {
        for (var j = lane; j < span; j = j + lanes) {
            let row = matrix(first + j);
            let each = vec4<f32>(bias[row + columns.x], bias[row + columns.y], bias[row + columns.z], bias[row + columns.w]);
            sum = sum + share(first + j) * each;
        }
    }
    return sum;
}

fn store(at: u32, n: u32, sum: f32) {
    if (n < params.n) {
        if (has(RESIDUAL)) {
            out[at * params.n + n] = residual[at * params.n + n] + sum;
        } else {
            out[at * params.n + n] = sum;
        }
    }
}

fn store_pair(at: u32, n: u32, sum: f32, next: f32) {
    if (!has(GATED)) {
        store(at, n, sum);
        store(at, n + 1u, next);
    } else if (n < params.n) {
        out[at * (params.n / 2u) + n / 2u] = apply(sum, next);
    }
}
