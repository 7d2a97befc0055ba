// out[tokens, n] = bias[n] + Σ_k x[tokens, k] · (nibble(n, k) − 8) · scales[k / group_size, n]
// The baseline: one workgroup per row of x, lanes stride over n, scalar loop over k. Every weight is unpacked
// m times and every input read n times. Any shape, any group size.

const WG: u32 = 64u;
const HAS_BIAS: bool = false;

struct Params {
    tokens: u32,
    k: u32,
    n: u32,           // rows of this range of the weight
    words: u32,       // u32 words per weight row
    group_size: u32,
    groups: u32,
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;          // [tokens, k]
@group(0) @binding(1) var<storage, read> weight: array<u32>;     // [n, words], 8 nibbles a word, nibble j at bits 4j
@group(0) @binding(2) var<storage, read> scales: array<f32>;     // [groups, n]
@group(0) @binding(3) var<storage, read> bias: array<f32>;       // [n] if HAS_BIAS
@group(0) @binding(4) var<storage, read> residual: array<f32>;   // unused: what the packed routes have here
@group(0) @binding(5) var<storage, read_write> out: array<f32>;  // [tokens, n_total]
@group(0) @binding(6) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if (row >= params.tokens) {
        return;
    }
    for (var n = lane; n < params.n; n = n + WG) {
        var total = 0.0;
        for (var k = 0u; k < params.k; k = k + 1u) {
            let word = weight[n * params.words + k / 8u];
            let q = f32((word >> (4u * (k % 8u))) & 15u) - 8.0;
            total = total + x[row * params.k + k] * q * scales[(k / params.group_size) * params.n + n];
        }
        if (HAS_BIAS) {
            total = total + bias[n];
        }
        out[row * params.n_total + params.n_first + n] = total;
    }
}
