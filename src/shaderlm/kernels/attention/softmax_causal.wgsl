// scores[h, s, c] ← exp(scores − max) / Σ exp(scores − max) over the keys c ≤ pos + first + s, pos = position of row 0;
// 0 from there to the next multiple of 4 past the last key that any query of this dispatch sees
// In place. Grid: one workgroup per (h, s), folded.

const WG: u32 = 64u;

@group(0) @binding(0) var<storage, read> batch: array<vec4<u32>>;       // [1 + tokens], consecutive rows of one sequence
@group(0) @binding(1) var<storage, read_write> scores: array<f32>;  // [heads, rows, stride]
@group(0) @binding(2) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if (row >= params.heads * params.rows) {
        return;
    }
    let base = row * params.stride;
    let context = first_position() + params.rows;
    let visible = context - params.rows + row % params.rows + 1u;
    var largest = -3.4e38;
    for (var c = lane; c < visible; c = c + WG) {
        largest = max(largest, scores[base + c]);
    }
    largest = workgroup_max(largest, lane);
    var total = 0.0;
    for (var c = lane; c < visible; c = c + WG) {
        let e = exp(scores[base + c] - largest);
        scores[base + c] = e;
        total = total + e;
    }
    let factor = 1.0 / workgroup_sum(total, lane);
    for (var c = lane; c < (context + 3u) / 4u * 4u; c = c + WG) {
        if (c < visible) {
            scores[base + c] = scores[base + c] * factor;
        } else {
            scores[base + c] = 0.0;
        }
    }
}
