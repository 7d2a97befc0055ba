// out[i] = x[i], at least low and at most high
// Grid: one thread per value, folded.

const WG: u32 = 64u;

struct Params {
    count: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;          // [count]
@group(0) @binding(1) var<storage, read> low: array<f32>;        // [1]
@group(0) @binding(2) var<storage, read> high: array<f32>;       // [1]
@group(0) @binding(3) var<storage, read_write> out: array<f32>;  // [count]
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
    out[index] = min(max(x[index], low[0]), high[0]);
}
