// out[tokens, n] = epilogue(Σ_k x[tokens, k] · w[n, k])        format of the weights and epilogue are included
// For fewer columns than a block of weights has: rows of x lie without padding, those of the weight end with zeros.
// Grid: one thread for two results, folded.

const WG: u32 = 64u;

struct Params {
    tokens: u32,
    k: u32,           // columns of the weight, as it lies: a multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // groups of scales per row
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,     // length of a row of out
    epilogue: u32,    // what becomes of the sums
    columns: u32,     // of x
}

@group(0) @binding(0) var<storage, read> x: array<f32>;            // [tokens, columns]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // none: the format has no scales
@group(0) @binding(3) var<storage, read> bias: array<f32>;         // [n] if there is one
@group(0) @binding(4) var<uniform> params: Params;

fn product(m: u32, n: u32) -> f32 {
    var sum = 0.0;
    for (var k = 0u; k < params.columns; k = k + 1u) {
        sum = sum + x[m * params.columns + k] * weight4(n, k / 4u)[k % 4u];
    }
    return sum;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let pairs = (params.n + 1u) / 2u;
    let index = (group.x + group.y * groups.x) * WG + lane;
    let m = index / pairs;
    let n = index % pairs * 2u;
    if (m < row_count()) {
        store_pair(m, n, product(m, n), product(m, min(n + 1u, params.n - 1u)));
    }
}
