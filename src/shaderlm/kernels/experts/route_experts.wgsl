// s = gating(logits[t]); ids[t] = the USED experts with the largest s + bias, the largest first, of equals the lowest;
// factors[t, j] = scale · s[ids[t, j]], divided by their sum if NORMALISE
// Gating: SOFTMAX over all experts, SOFTMAX_USED over the chosen ones, else the sigmoid of each.
// A workgroup keeps the scores of a row in workgroup memory. The place of an expert is the number of those that go before
// it, which every lane counts for its own: more comparisons than a search for the best one, and far fewer barriers.
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

var<workgroup> scores: array<f32, EXPERTS>;  // logits, then scores
var<workgroup> ranks: array<f32, EXPERTS>;
var<workgroup> chosen: array<u32, USED>;

fn has(part: u32) -> bool {
    return (params.how & part) != 0u;
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
    for (var e = lane; e < params.experts; e = e + WG) {
        scores[e] = logits[first + e];
    }
    var sum = 1.0;
    if (has(SOFTMAX)) {
        workgroupBarrier();
        var top = LOWEST;
        for (var e = 0u; e < params.experts; e = e + 1u) {
            top = max(top, scores[e]);
        }
        workgroupBarrier();  // every lane has read all logits
        for (var e = lane; e < params.experts; e = e + WG) {
            scores[e] = exp(scores[e] - top);
        }
        workgroupBarrier();
        sum = 0.0;
        for (var e = 0u; e < params.experts; e = e + 1u) {
            sum = sum + scores[e];
        }
        workgroupBarrier();  // every lane has read all powers
    }
    for (var e = lane; e < params.experts; e = e + WG) {
        var score = scores[e];
        if (has(SOFTMAX)) {
            score = score / sum;
        } else if (!has(SOFTMAX_USED)) {
            score = sigmoid(score);
        }
        scores[e] = score;
        var rank = score;
        if (has(BIAS)) {
            rank = rank + bias[e];
        }
        ranks[e] = select(LOWEST, max(rank, LOWEST), rank == rank);
    }
    workgroupBarrier();
    for (var e = lane; e < params.experts; e = e + WG) {
        let own = ranks[e];
        var before = 0u;
        for (var other = 0u; other < params.experts; other = other + 1u) {
            let rank = ranks[other];
            before = before + select(0u, 1u, rank > own || (rank == own && other < e));
        }
        if (before < params.used) {
            chosen[before] = e;
        }
    }
    workgroupBarrier();
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
