// out[t, i] = x[t, i], and zeros from the width of x to that of out
// A value is four where rows are whole quads.
// Grid: one thread per value of out, folded.

alias value = f32;
const WG: u32 = 64u;

struct Params {
    count: u32,  // values of out
    width: u32,  // of x
    to: u32,     // of out
}

@group(0) @binding(0) var<storage, read> x: array<value>;          // [tokens, width]
@group(0) @binding(1) var<storage, read_write> out: array<value>;  // [tokens, to]
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
    let i = index % params.to;
    let at = index / params.to * params.width + min(i, params.width - 1u);
    out[index] = select(value(), x[at], i < params.width);
}
