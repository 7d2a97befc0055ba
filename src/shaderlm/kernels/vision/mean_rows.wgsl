// out[t, i] = mean_j x[size · t + j, i]
// Grid: one thread per value of out, folded.

const WG: u32 = 64u;

struct Params {
    count: u32,  // values of out
    size: u32,   // rows of x for each of out
    width: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;          // [tokens · size, width]
@group(0) @binding(1) var<storage, read_write> out: array<f32>;  // [tokens, width]
@group(0) @binding(2) var<uniform> params: Params;

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
    let first = index / params.width * params.size * params.width + index % params.width;
    var sum = 0.0;
    for (var j = 0u; j < params.size; j = j + 1u) {
        sum = sum + x[first + j * params.width];
    }
    out[index] = sum / f32(params.size);
}
