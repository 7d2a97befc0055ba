// s = gating(logits[t]); ids[t] = the USED experts with the largest s + bias, the largest first, of equals the lowest;
// factors[t, j] = scale · s[ids[t, j]], divided by their sum if NORMALISE
// Gating: SOFTMAX over all experts, SOFTMAX_USED over the chosen ones, else the sigmoid of each.
// A workgroup keeps the scores of a row in workgroup memory and takes the best of those that are left, USED times.
// A NaN is taken last. Grid: one workgroup per row, folded.

const WG: u32 = 64u;
const EXPERTS: u32 = 128u;  // room for as many
const USED: u32 = 8u;       // room for as many

// Bits of params.how.
const SOFTMAX: u32 = 1u;
const SOFTMAX_USED: u32 = 2u;
const NORMALISE: u32 = 4u;
const BIAS: u32 = 8u;

struct Params {
    tokens: u32,
    experts: u32,
    used: u32,
    how: u32,
    scale: f32,
}

@group(0) @binding(0) var<storage, read> logits: array<f32>;             // [tokens, experts]
@group(0) @binding(1) var<storage, read> bias: array<f32>;               // [experts] if there is one
@group(0) @binding(2) var<storage, read_write> ids: array<u32>;          // [tokens, used]
@group(0) @binding(3) var<storage, read_write> factors: array<f32>;      // [tokens, used]
@group(0) @binding(4) var<uniform> params: Params;

const LOWEST: f32 = -3.4e38;
const TAKEN: f32 = -3.402823e38;

var<workgroup> scores: array<f32, EXPERTS>;
var<workgroup> ranks: array<f32, EXPERTS>;
var<workgroup> chosen: array<u32, USED>;
var<workgroup> slots: array<f32, WG>;
var<workgroup> places: array<u32, WG>;

fn has(part: u32) -> bool {
    return (params.how & part) != 0u;
}

// The largest value, of equals that with the lowest index. Every lane gets it, as slots[0] and places[0].
fn best_of_workgroup(lane: u32, value: f32, index: u32) {
    workgroupBarrier();
    slots[lane] = value;
    places[lane] = index;
    workgroupBarrier();
    for (var width = WG / 2u; width > 0u; width = width / 2u) {
        if (lane < width) {
            let other = slots[lane + width];
            let place = places[lane + width];
            if (other > slots[lane] || (other == slots[lane] && place < places[lane])) {
                slots[lane] = other;
                places[lane] = place;
            }
        }
        workgroupBarrier();
    }
}

fn sum_of_workgroup(lane: u32, value: f32) -> f32 {
    workgroupBarrier();
    slots[lane] = value;
    workgroupBarrier();
    for (var width = WG / 2u; width > 0u; width = width / 2u) {
        if (lane < width) {
            slots[lane] = slots[lane] + slots[lane + width];
        }
        workgroupBarrier();
    }
    return slots[0];
}

// Below −88 exp overflows.
fn sigmoid(v: f32) -> f32 {
    return select(1.0 / (1.0 + exp(-max(v, -88.0))), 0.0, v < -88.0);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if (row >= row_count()) {
        return;
    }
    let first = row * params.experts;
    var top = LOWEST;
    for (var e = lane; e < params.experts; e = e + WG) {
        top = max(top, logits[first + e]);
    }
    best_of_workgroup(lane, top, lane);
    top = slots[0];
    var sum = 0.0;
    for (var e = lane; e < params.experts; e = e + WG) {
        let v = logits[first + e];
        var score = v;
        if (has(SOFTMAX)) {
            score = exp(v - top);
            sum = sum + score;
        } else if (!has(SOFTMAX_USED)) {
            score = sigmoid(v);
        }
        scores[e] = score;
    }
    sum = sum_of_workgroup(lane, sum);
    for (var e = lane; e < params.experts; e = e + WG) {
        if (has(SOFTMAX)) {
            scores[e] = scores[e] / sum;
        }
        var rank = scores[e];
        if (has(BIAS)) {
            rank = rank + bias[e];
        }
        ranks[e] = select(LOWEST, max(rank, LOWEST), rank == rank);
    }
    workgroupBarrier();
    for (var j = 0u; j < params.used; j = j + 1u) {
        var value = TAKEN;
        var index = params.experts - 1u;
        for (var e = lane; e < params.experts; e = e + WG) {
            if (ranks[e] > value) {
                value = ranks[e];
                index = e;
            }
        }
        best_of_workgroup(lane, value, index);
        if (lane == 0u) {
            chosen[j] = places[0];
            ranks[places[0]] = TAKEN;
        }
        workgroupBarrier();
    }
    // The largest score of the chosen ones, and what their factors are divided by.
    var largest = LOWEST;
    for (var j = 0u; j < params.used; j = j + 1u) {
        largest = max(largest, scores[chosen[j]]);
    }
    var total = 0.0;
    for (var j = 0u; j < params.used; j = j + 1u) {
        let score = scores[chosen[j]];
        total = total + select(score, exp(score - largest), has(SOFTMAX_USED));
    }
    for (var j = lane; j < params.used; j = j + WG) {
        var factor = scores[chosen[j]];
        if (has(SOFTMAX_USED)) {
            factor = exp(factor - largest) / total;
        } else if (has(NORMALISE)) {
            factor = factor / total;
        }
        ids[row * params.used + j] = chosen[j];
        factors[row * params.used + j] = factor * params.scale;
    }
}
