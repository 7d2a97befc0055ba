// out[t, n] = Σ_j y[t · used + j, n], residual added if there is one
// Grid: one thread per value, folded.

const WG: u32 = 64u;

struct Params {
    tokens: u32,
    used: u32,
    n: u32,
    add: u32,  // is there a residual?
}

@group(0) @binding(0) var<storage, read> y: array<f32>;            // [tokens, used, n]
@group(0) @binding(1) var<storage, read> residual: array<f32>;     // [tokens, n] if there is one
@group(0) @binding(2) var<storage, read_write> out: array<f32>;    // [tokens, n]
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let row = index / params.n;
    if (row >= row_count()) {
        return;
    }
    var sum = 0.0;
    if (params.add != 0u) {
        sum = residual[index];
    }
    for (var j = 0u; j < params.used; j = j + 1u) {
        sum = sum + y[(row * params.used + j) * params.n + index % params.n];
    }
    out[index] = sum;
}
