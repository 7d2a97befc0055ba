// out[i] = x[i]        the yardstick of memory speed: every other kernel is measured against it
// Grid: one thread per four values, folded.

const WG: u32 = 256u;

struct Params {
    count: u32,  // quads
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;          // [count]
@group(0) @binding(1) var<storage, read_write> out: array<vec4<f32>>;  // [count]
@group(0) @binding(2) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    if (index < params.count) {
        out[index] = x[index];
    }
}
