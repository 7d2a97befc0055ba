// out = first i where the running sum of kept probabilities exceeds u · their total; kept: logits[i] ≥ a threshold
// The threshold is the highest of three: the top_k-th largest logit; where the largest probabilities reach top_p of
// what top_k left; top + temperature · ln(min_p). Nothing is sorted. A logit becomes a key, an integer of the same
// order, and the first two thresholds are found four bits of the key at a time: every pass sums what each of the 16
// values of those bits holds (a count for top_k, probabilities for top_p) and goes on inside one of them.
// −inf and NaN are never drawn; where there is nothing else, out is 0.
// Grid: one workgroup. Needs width ≤ 2^24, where f32 counts are exact, and WG = TEAM, a power of two.

const WG: u32 = 256u;
const TEAM: u32 = 256u;
const ROWS: u32 = 4u;

const LOWEST: u32 = 0x00800000u;   // key of the lowest finite f32; below it: −inf, NaN and what is past the end
const HIGHEST: u32 = 0xff7fffffu;  // key of the highest finite f32; +inf counts as that
const LEAST: f32 = 1e-30;          // stands for a top_p or a temperature of 0

struct Params {
    width: u32,
}

struct Choice {
    temperature: f32,
    top_k: u32,  // 0: off
    top_p: f32,  // 1: off
    min_p: f32,  // 0: off
    u: f32,      // in [0, 1)
}

struct Drawn {
    quad: u32,
    due: f32,
}

@group(0) @binding(0) var<storage, read> logits: array<vec4<u32>>;  // [width], the bits of f32; any padding
@group(0) @binding(1) var<storage, read> choice: Choice;            // written by the host for every token
@group(0) @binding(2) var<storage, read_write> out: array<u32>;     // [1]
@group(0) @binding(3) var<uniform> params: Params;

var<workgroup> wanted: Choice;                    // a copy that counts as uniform
var<workgroup> settled: u32;                      // 1: what is left of a search is a single logit
var<workgroup> tallies: array<vec4<f32>, 4u>;     // per value of four bits
var<workgroup> running: array<f32, WG>;           // sums up to and with a lane
var<workgroup> owner: atomic<u32>;                // lowest segment whose running sum exceeds the target
var<workgroup> last: atomic<u32>;                 // highest segment that has anything

fn keys_of(bits: vec4<u32>) -> vec4<u32> {
    let magnitude = bits & vec4<u32>(0x7fffffffu);
    var keys = select(bits | vec4<u32>(0x80000000u), ~bits, bits > vec4<u32>(0x80000000u));  // −0 is 0
    keys = min(keys, vec4<u32>(HIGHEST));
    return select(keys, vec4<u32>(0u), magnitude > vec4<u32>(0x7f800000u));
}

fn value_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, key >= 0x80000000u));
}

fn quads() -> u32 {
    return (params.width + 3u) / 4u;
}

// Keys of four neighbouring logits. Past the end: 0.
fn four_keys(quad: u32) -> vec4<u32> {
    let keys = keys_of(logits[min(quad, quads() - 1u)]);
    let index = vec4<u32>(4u * quad) + vec4<u32>(0u, 1u, 2u, 3u);
    return select(vec4<u32>(0u), keys, index < vec4<u32>(params.width));
}

// Probability of a logit, as a multiple of the largest logit's. Below e^−100 is nothing, and exp(−inf) is undefined.
fn weight_of(key: u32, top: f32, temperature: f32) -> f32 {
    return exp(max((value_of(key) - top) / temperature, -100.0));
}

// The same of four logits; of those that are not kept, 0.
fn four_weights(keys: vec4<u32>, lowest: u32, top: f32, temperature: f32) -> vec4<f32> {
    var weights = vec4<f32>();
    if (keys.x >= lowest) {
        weights.x = weight_of(keys.x, top, temperature);
    }
    if (keys.y >= lowest) {
        weights.y = weight_of(keys.y, top, temperature);
    }
    if (keys.z >= lowest) {
        weights.z = weight_of(keys.z, top, temperature);
    }
    if (keys.w >= lowest) {
        weights.w = weight_of(keys.w, top, temperature);
    }
    return weights;
}

// What a search adds up: 1 or the weight of each key that is inside, 0 for the others.
fn measure(counting: bool, keys: vec4<u32>, inside: vec4<bool>, top: f32, temperature: f32) -> vec4<f32> {
    if (counting) {
        return select(vec4<f32>(), vec4<f32>(1.0), inside);
    }
    return four_weights(select(vec4<u32>(0u), keys, inside), LOWEST, top, temperature);
}

// Adds the value to the sum that the lowest four bits name. A register cannot be chosen at run time: all are visited.
fn tally(sums: mat4x4<f32>, key: u32, value: f32) -> mat4x4<f32> {
    let digits = vec4<u32>(key & 15u);
    let none = vec4<f32>();
    let some = vec4<f32>(value);
    return mat4x4<f32>(
        sums[0] + select(none, some, digits == vec4<u32>(0u, 1u, 2u, 3u)),
        sums[1] + select(none, some, digits == vec4<u32>(4u, 5u, 6u, 7u)),
        sums[2] + select(none, some, digits == vec4<u32>(8u, 9u, 10u, 11u)),
        sums[3] + select(none, some, digits == vec4<u32>(12u, 13u, 14u, 15u)),
    );
}

// Sums over all lanes, left in tallies.
fn tally_workgroup(sums: mat4x4<f32>, lane: u32) {
    let a = team_sum(sums[0], lane);
    workgroupBarrier();  // the slots of team_sum have been read
    let b = team_sum(sums[1], lane);
    workgroupBarrier();
    let c = team_sum(sums[2], lane);
    workgroupBarrier();
    let d = team_sum(sums[3], lane);
    if (lane == 0u) {
        tallies = array<vec4<f32>, 4u>(a, b, c, d);
    }
    workgroupBarrier();
}

// The highest key t for which the sum over all keys ≥ t, none below `lowest`, reaches the target: a count, or else a
// part of all probabilities. Where rounding keeps the sum just below the target: 0.
fn threshold(counting: bool, goal: f32, lowest: u32, top: f32, temperature: f32, lane: u32) -> u32 {
    var known = 0u;  // the bits of t so far, from the highest
    var above = 0.0;  // the sum over keys that are larger in those bits
    var due = goal;
    var shift = 32u;
    loop {
        shift = shift - 4u;
        var sums = mat4x4<f32>();
        var count = 0.0;
        for (var quad = lane; quad < quads(); quad = quad + WG) {
            let keys = four_keys(quad);
            let same = ((keys >> vec4<u32>(shift)) >> vec4<u32>(4u)) == vec4<u32>(known);  // a shift by 32 is undefined
            let inside = same & (keys >= vec4<u32>(lowest));
            if (any(inside)) {  // rare but in the first passes
                let digits = keys >> vec4<u32>(shift);
                let values = measure(counting, keys, inside, top, temperature);
                sums = tally(sums, digits.x, values.x);
                sums = tally(sums, digits.y, values.y);
                sums = tally(sums, digits.z, values.z);
                sums = tally(sums, digits.w, values.w);
                count = count + dot(select(vec4<f32>(), vec4<f32>(1.0), inside), vec4<f32>(1.0));
            }
        }
        count = workgroup_sum(count, lane);
        tally_workgroup(sums, lane);
        if (shift == 28u && !counting) {
            let four = tallies[0] + tallies[1] + tallies[2] + tallies[3];
            due = max(goal * (four.x + four.y + four.z + four.w), LEAST);
        }
        var digit = 15u;
        for (; digit > 0u; digit = digit - 1u) {
            let sum = above + tallies[digit / 4u][digit % 4u];
            if (sum >= due) {
                break;
            }
            above = sum;
        }
        known = (known << 4u) | digit;
        if (lane == 0u) {
            settled = select(0u, 1u, count <= 1.0);
        }
        if (workgroupUniformLoad(&settled) == 1u || shift == 0u) {
            break;
        }
    }
    return known << shift;
}

// Leaves in `running`, per lane, the sum of this value over all lanes up to it.
fn scan(value: f32, lane: u32) {
    running[lane] = value;
    for (var offset = 1u; offset < WG; offset = offset * 2u) {
        workgroupBarrier();
        var sum = running[lane];
        if (lane >= offset) {
            sum = sum + running[lane - offset];
        }
        workgroupBarrier();
        running[lane] = sum;
    }
    workgroupBarrier();
}

// The quad of logits where the running sum exceeds its target, and what is left of the target there: segments are
// summed, and the one where the target lies is divided again until it is one quad. A long segment is summed by 32
// lanes that read neighbours, a short one by one lane.
fn draw(lowest: u32, top: f32, temperature: f32, u: f32, lane: u32) -> Drawn {
    var first = 0u;
    var length = quads();
    var due = u;
    loop {
        let lanes = select(1u, 32u, length > 4u * WG);
        let segment = lane / lanes;
        let step = (length + WG / lanes - 1u) / (WG / lanes);
        let end = first + min(segment * step + step, length);
        var sum = 0.0;
        for (var quad = first + segment * step + lane % lanes; quad < end; quad = quad + lanes) {
            sum = sum + dot(four_weights(four_keys(quad), lowest, top, temperature), vec4<f32>(1.0));
        }
        if (lane == 0u) {
            atomicStore(&owner, WG);
            atomicStore(&last, 0u);
        }
        scan(sum, lane);
        if (length == quads()) {
            due = u * running[WG - 1u];
        }
        if (sum > 0.0) {  // sums of different lanes round differently: an empty segment must not win by that
            atomicMax(&last, segment);
            if (running[segment * lanes + lanes - 1u] > due) {
                atomicMin(&owner, segment);
            }
        }
        workgroupBarrier();
        // Rounding may put the target past the end: then it is the last segment that has anything.
        let chosen = min(atomicLoad(&owner), atomicLoad(&last));
        if (chosen > 0u) {
            first = first + chosen * step;
            due = due - running[chosen * lanes - 1u];
        }
        workgroupBarrier();  // all have read before the next round writes
        length = step;
        if (step == 1u) {
            break;
        }
    }
    return Drawn(first, due);
}

// The index inside a quad: the first kept one where the sum exceeds the target, else the last kept one.
fn pick(weights: vec4<f32>, due: f32) -> u32 {
    let sums = vec4<f32>(
        weights.x, weights.x + weights.y, weights.x + weights.y + weights.z, dot(weights, vec4<f32>(1.0)),
    );
    let some = weights > vec4<f32>();
    let there = some & (sums > vec4<f32>(due));
    var index = select(select(select(0u, 1u, some.y), 2u, some.z), 3u, some.w);
    index = select(index, 3u, there.w);
    index = select(index, 2u, there.z);
    index = select(index, 1u, there.y);
    return select(index, 0u, there.x);
}

@compute @workgroup_size(WG)
fn main(@builtin(local_invocation_index) lane: u32) {
    if (lane == 0u) {
        wanted = choice;
    }
    let settings = workgroupUniformLoad(&wanted);
    let temperature = max(settings.temperature, LEAST);
    var top_key = LOWEST;
    for (var quad = lane; quad < quads(); quad = quad + WG) {
        let keys = four_keys(quad);
        top_key = max(top_key, max(max(keys.x, keys.y), max(keys.z, keys.w)));
    }
    let top = workgroup_max(value_of(top_key), lane);
    var lowest = LOWEST;
    for (var search = 0u; search < 2u; search = search + 1u) {  // one copy of the search for both
        let counting = search == 0u;
        var goal = settings.top_p;
        var wants = settings.top_p < 1.0;
        if (counting) {
            goal = f32(settings.top_k);
            wants = settings.top_k > 0u && settings.top_k < params.width;
        }
        if (wants) {
            lowest = max(lowest, threshold(counting, goal, lowest, top, temperature, lane));
        }
    }
    if (settings.min_p > 0.0) {
        let least = min(top + temperature * log(settings.min_p), top);
        lowest = max(lowest, keys_of(bitcast<vec4<u32>>(vec4<f32>(least))).x);
    }
    let drawn = draw(lowest, top, temperature, settings.u, lane);
    if (lane == 0u) {
        let weights = four_weights(four_keys(drawn.quad), lowest, top, temperature);
        out[0] = 4u * drawn.quad + pick(weights, drawn.due);
    }
}
