// scores[h, s, c] ← exp(scores − max) / Σ exp(scores − max) over the keys c ≤ pos + first + s; 0 beyond them
// In place. Grid: one workgroup per (h, s), folded.

const WG: u32 = 64u;

struct Params {
    rows: u32,      // queries of this dispatch
    first: u32,     // the first of them in q and out
    context: u32,   // keys that the last of them sees
    stride: u32,    // context rounded up to a multiple of 4: length of a row of scores
    pos: u32,
    heads: u32,     // query heads
    kv_heads: u32,
    quads: u32,     // D / 4
    scale: f32,
}

@group(0) @binding(0) var<storage, read_write> scores: array<f32>;  // [heads, rows, stride]
@group(0) @binding(1) var<uniform> params: Params;

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
    let visible = min(params.pos + params.first + row % params.rows + 1u, params.context);
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
    for (var c = lane; c < params.stride; c = c + WG) {
        if (c < visible) {
            scores[base + c] = scores[base + c] * factor;
        } else {
            scores[base + c] = 0.0;
        }
    }
}
