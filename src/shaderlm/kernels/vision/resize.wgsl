// out[o, i, c] = Σ_j weights[i, j] · x[o, first[i] + j, c], rounded to a whole number from 0 to 255
// x is f32 or bytes: that is included. Weights are multiples of a power of two, so that no sum is rounded: all devices agree.
// Grid: one thread per value of out, folded.

const WG: u32 = 64u;

struct Params {
    count: u32,  // values of out
    size: u32,   // of the axis, in x
    inner: u32,
    to: u32,     // of the axis, in out
    taps: u32,
}

@group(0) @binding(0) var<storage, read> x: array<u32>;          // [outer, size, inner]
@group(0) @binding(1) var<storage, read> first: array<u32>;      // [to]
@group(0) @binding(2) var<storage, read> weights: array<f32>;    // [to, taps]
@group(0) @binding(3) var<storage, read_write> out: array<f32>;  // [outer, to, inner]
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
    let c = index % params.inner;
    let i = index / params.inner % params.to;
    let o = index / params.inner / params.to;
    let start = first[i];
    var sum = 0.0;
    for (var j = 0u; j < params.taps; j = j + 1u) {
        let at = (o * params.size + min(start + j, params.size - 1u)) * params.inner + c;
        sum = sum + weights[i * params.taps + j] * pixel_value(at);
    }
    out[index] = clamp(floor(sum + 0.5), 0.0, 255.0);
}
