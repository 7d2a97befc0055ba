// out = a, then b: two arrays one after the other
// A value is four where both are whole quads.
// Grid: one thread per value of out, folded.

alias value = f32;
const WG: u32 = 64u;

struct Params {
    first: u32,  // values of a
    count: u32,  // of out
}

@group(0) @binding(0) var<storage, read> a: array<value>;
@group(0) @binding(1) var<storage, read> b: array<value>;
@group(0) @binding(2) var<storage, read_write> out: array<value>;
@group(0) @binding(3) var<uniform> params: Params;

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
    if (index < params.first) {
        out[index] = a[index];
    } else {
        out[index] = b[index - params.first];
    }
}
