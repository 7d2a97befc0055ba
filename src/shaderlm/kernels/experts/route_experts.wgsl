// s = gating(logits[t]); ids[t] = the USED experts with the largest s + bias, the largest first, of equals the lowest;
// factors[t, j] = scale · s[ids[t, j]], divided by their sum if NORMALISE, times expert_scale[ids[t, j]] if SCALED
// SHARED: one more expert for every row, after the others, whose factor is the sigmoid of the last logit.
// Gating: SOFTMAX over all experts, SOFTMAX_USED over the chosen ones, else the sigmoid of each. Without a bias, logits are
// in the same order as scores.
// A workgroup keeps the logits of a row in workgroup memory. The place of an expert is the number of those that go before
// it, which every lane counts for its own: more comparisons than a search for the best one, and far fewer barriers. Reads of
// four experts each, and four of these at a time, do not wait for each other.
// A NaN is taken last. Grid: one workgroup per row, folded. Needs EXPERTS % 16 == 0.

const WG: u32 = 64u;
const EXPERTS: u32 = 128u;  // room for as many
const USED: u32 = 8u;       // room for as many
const QUADS: u32 = EXPERTS / 4u;

// Bits of params.how.
const SOFTMAX: u32 = 1u;
const SOFTMAX_USED: u32 = 2u;
const NORMALISE: u32 = 4u;
const BIAS: u32 = 8u;
const SCALED: u32 = 16u;
const SHARED: u32 = 32u;

struct Params {
    tokens: u32,
    experts: u32,
    used: u32,
    how: u32,
    scale: f32,
}

@group(0) @binding(0) var<storage, read> logits: array<f32>;             // [tokens, experts], one more if SHARED
@group(0) @binding(1) var<storage, read> bias: array<f32>;               // [experts] if there is one
@group(0) @binding(2) var<storage, read> expert_scale: array<f32>;       // [experts] if there is one
@group(0) @binding(3) var<storage, read_write> ids: array<u32>;          // [tokens, used], one more if SHARED
@group(0) @binding(4) var<storage, read_write> factors: array<f32>;      // [tokens, used]
@group(0) @binding(5) var<uniform> params: Params;

const LOWEST: f32 = -3.4e38;
const ABSENT: f32 = -3.402823e38;  // of an expert that there is not: after all others

var<workgroup> values: array<vec4<f32>, QUADS>;  // logits
var<workgroup> ranks: array<vec4<f32>, QUADS>;   // what experts are chosen by
var<workgroup> chosen: array<u32, USED>;
var<workgroup> scores: array<f32, USED>;         // of the chosen ones

fn has(part: u32) -> bool {
    return (params.how & part) != 0u;
}

// Below −88 exp overflows.
fn sigmoid(v: f32) -> f32 {
    return select(1.0 / (1.0 + exp(-max(v, -88.0))), 0.0, v < -88.0);
}

fn logit(first: u32, e: u32) -> f32 {
    if (e < params.experts) {
        return logits[first + e];
    }
    return ABSENT;
}

// The score of a logit; `top` and `sum` are those of a softmax.
fn score(v: f32, top: f32, sum: f32) -> f32 {
    if (has(SOFTMAX)) {
        return exp(v - top) / sum;
    }
    if (has(SOFTMAX_USED)) {
        return v;
    }
    return sigmoid(v);
}

fn rank(v: f32, e: u32, top: f32, sum: f32) -> f32 {
    if (e >= params.experts) {
        return ABSENT;
    }
    var found = v;
    if (has(BIAS)) {
        found = score(v, top, sum) + bias[e];
    }
    return select(LOWEST, max(found, LOWEST), found == found);
}

fn largest_of(v: vec4<f32>) -> f32 {
    return max(max(v.x, v.y), max(v.z, v.w));
}

fn sum_of(v: vec4<f32>) -> f32 {
    return v.x + v.y + v.z + v.w;
}

// How many of four go before `own` of expert e.
fn before(quad: u32, own: f32, e: u32) -> vec4<u32> {
    let others = ranks[quad];
    let equal = (others == vec4<f32>(own)) & (vec4<u32>(4u * quad) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(e));
    return select(vec4<u32>(), vec4<u32>(1u), (others > vec4<f32>(own)) | equal);
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
    let more = select(0u, 1u, has(SHARED));
    let first = row * (params.experts + more);
    for (var q = lane; q < QUADS; q = q + WG) {
        values[q] = vec4<f32>(logit(first, 4u * q), logit(first, 4u * q + 1u), logit(first, 4u * q + 2u), logit(first, 4u * q + 3u));
    }
    var top = 0.0;
    var sum = 1.0;
    if (has(SOFTMAX)) {
        workgroupBarrier();
        var most = vec4<f32>(LOWEST);
        for (var q = 0u; q < QUADS; q = q + 4u) {
            most = max(max(most, max(values[q], values[q + 1u])), max(values[q + 2u], values[q + 3u]));
        }
        top = largest_of(most);
        var powers = vec4<f32>();
        for (var q = 0u; q < QUADS; q = q + 4u) {
            let a = exp(values[q] - vec4<f32>(top)) + exp(values[q + 1u] - vec4<f32>(top));
            powers = powers + a + exp(values[q + 2u] - vec4<f32>(top)) + exp(values[q + 3u] - vec4<f32>(top));
        }
        sum = sum_of(powers);
    }
    for (var q = lane; q < QUADS; q = q + WG) {
        let v = values[q];
        let e = 4u * q;
        ranks[q] = vec4<f32>(
            rank(v.x, e, top, sum), rank(v.y, e + 1u, top, sum), rank(v.z, e + 2u, top, sum), rank(v.w, e + 3u, top, sum));
    }
    workgroupBarrier();
    for (var e = lane; e < params.experts; e = e + WG) {
        let own = ranks[e / 4u][e % 4u];
        var counts = vec4<u32>();
        for (var q = 0u; q < QUADS; q = q + 4u) {
            counts = counts + before(q, own, e) + before(q + 1u, own, e) + before(q + 2u, own, e) + before(q + 3u, own, e);
        }
        let place = counts.x + counts.y + counts.z + counts.w;
        if (place < params.used) {
            chosen[place] = e;
            scores[place] = score(values[e / 4u][e % 4u], top, sum);
        }
    }
    workgroupBarrier();
    // The largest score of the chosen ones, and what their factors are divided by.
    var largest = LOWEST;
    for (var j = 0u; j < params.used; j = j + 1u) {
        largest = max(largest, scores[j]);
    }
    var total = 0.0;
    for (var j = 0u; j < params.used; j = j + 1u) {
        total = total + select(scores[j], exp(scores[j] - largest), has(SOFTMAX_USED));
    }
    for (var j = lane; j < params.used; j = j + WG) {
        var factor = scores[j];
        if (has(SOFTMAX_USED)) {
            factor = exp(factor - largest) / total;
        } else if (has(NORMALISE)) {
            factor = factor / total;
        }
        if (has(SCALED)) {
            factor = factor * expert_scale[chosen[j]];
        }
        ids[row * (params.used + more) + j] = chosen[j];
        factors[row * (params.used + more) + j] = factor * params.scale;
    }
    if (has(SHARED) && lane == 0u) {
        ids[row * (params.used + 1u) + params.used] = params.experts;
        factors[row * (params.used + 1u) + params.used] = sigmoid(logits[first + params.experts]);
    }
}
