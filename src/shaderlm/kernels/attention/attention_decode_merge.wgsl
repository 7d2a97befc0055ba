// out[0, h, d] = Σ_split exp(m − M) · partial[h, split, d] / Σ_split exp(m − M) · l,   (m, l) = stats[h, split], M = max m
// Grid: one workgroup per query head, folded.

const WG: u32 = 64u;

struct Params {
    heads: u32,
    splits: u32,
    quads: u32,
}

@group(0) @binding(0) var<storage, read> partial: array<vec4<f32>>;    // [heads, splits, quads]
@group(0) @binding(1) var<storage, read> stats: array<vec2<f32>>;      // [heads, splits]
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;  // [1, heads, quads]
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let h = group.x + group.y * groups.x;
    if (h >= params.heads) {
        return;
    }
    var largest = -1e30;
    for (var i = lane; i < params.splits; i = i + WG) {
        largest = max(largest, stats[h * params.splits + i].x);
    }
    largest = workgroup_max(largest, lane);
    var total = 0.0;
    for (var i = lane; i < params.splits; i = i + WG) {
        let s = stats[h * params.splits + i];
        total = total + exp(s.x - largest) * s.y;
    }
    let factor = 1.0 / workgroup_sum(total, lane);
    for (var d = lane; d < params.quads; d = d + WG) {
        var sum = vec4<f32>();
        for (var i = 0u; i < params.splits; i = i + 1u) {
            let row = h * params.splits + i;
            sum = sum + exp(stats[row].x - largest) * partial[row * params.quads + d];
        }
        out[h * params.quads + d] = sum * factor;
    }
}
