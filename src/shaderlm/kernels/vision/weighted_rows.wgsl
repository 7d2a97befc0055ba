// out[t, :] = Σ_j factors[t, j] · table[rows[t, j], :]
// A value is four where rows are whole quads.
// Grid: one thread per value of out, folded.

alias value = f32;
const WG: u32 = 64u;

struct Params {
    count: u32,  // values of out
    width: u32,
    taps: u32,
}

@group(0) @binding(0) var<storage, read> weight: array<value>;   // [n, width]
@group(0) @binding(1) var<storage, read> rows: array<u32>;       // [tokens, taps]
@group(0) @binding(2) var<storage, read> factors: array<f32>;    // [tokens, taps]
@group(0) @binding(3) var<storage, read_write> out: array<value>; // [tokens, width]
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    if (index >= params.count) {
        return;
    }
    let t = index / params.width;
    var sum = value();
    for (var j = 0u; j < params.taps; j = j + 1u) {
        let row = min(rows[t * params.taps + j], arrayLength(&weight) / params.width - 1u);
        sum = sum + factors[t * params.taps + j] * weight[row * params.width + index % params.width];
    }
    out[index] = sum;
}
