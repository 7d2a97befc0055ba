// out[t, i] = x[t, first + i]: some columns of a matrix, as a matrix of their own
// Grid: one thread per value of out, folded.

const WG: u32 = 64u;

struct Params {
    tokens: u32,
    width: u32,  // columns of x
    first: u32,
    count: u32,  // columns of out
}

@group(0) @binding(0) var<storage, read> x: array<f32>;          // [tokens, width]
@group(0) @binding(1) var<storage, read_write> out: array<f32>;  // [tokens, count]
@group(0) @binding(2) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let row = index / params.count;
    if (row < row_count()) {
        out[index] = x[row * params.width + params.first + index % params.count];
    }
}
