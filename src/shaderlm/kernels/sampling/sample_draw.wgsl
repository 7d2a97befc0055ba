// tokens[slot of output r] = first i where the running sum of kept weights exceeds u · their total
// Last of four dispatches of sampling; it ends the step. Kept: logits[r, i] ≥ a threshold, the highest of three: the
// top_k-th largest logit; where the largest weights reach top_p of what top_k left; min_p of the largest weight. The
// first two are searched for among the keys that were gathered, or, should these not contain them, among all of the
// row. Then the chunk is found in which the sum exceeds its goal, and the logit in it.
// −inf and NaN are never drawn; where there is nothing else, the token is 0.
// Grid: one workgroup per row of logits, folded. Needs width ≤ 2^24, where f32 counts are exact, and parts ≤ WG.

const WG: u32 = 256u;
const CHUNK: u32 = 2048u;
const CACHED: u32 = 1024u;

struct Params {
    width: u32,
    parts: u32,  // chunks per row
    lanes: u32,  // for each chunk, when they are added up: a power of two, lanes · parts ≤ WG
}

@group(0) @binding(0) var<storage, read> logits: array<u32>;              // [rows, width], the bits of f32
@group(0) @binding(1) var<storage, read> outputs: array<vec4<u32>>;       // [rows, 2]
@group(0) @binding(2) var<storage, read> gathered: array<u32>;            // [rows, width], the first few of each chunk
@group(0) @binding(3) var<storage, read> sums: array<vec4<f32>>;          // [rows, parts, 2]
@group(0) @binding(4) var<storage, read_write> tokens: array<u32>;        // [sequence slots]
@group(0) @binding(5) var<storage, read_write> batch: array<vec4<u32>>;   // [1 + tokens]
@group(0) @binding(6) var<uniform> params: Params;

// The keys that are searched: those that were gathered, or all of the row.
struct List {
    output: u32,
    whole: bool,
    length: u32,
    all: vec2<f32>,    // weight and number of the row's logits that have any
    above: vec2<f32>,  // of those that are kept anyway and not in the list
}

struct Found {
    lowest: u32,  // the threshold of top_k and top_p
    sure: bool,   // false: it is not in the list
}

struct Place {
    segment: u32,
    due: f32,  // what is left of the goal there
}

var<workgroup> outputs_there: u32;
var<workgroup> sure: u32;
var<workgroup> limits: vec2<u32>;                // lowest and highest key that the threshold can be
var<workgroup> starts: array<u32, WG>;           // per chunk: how many keys of the list come before it
var<workgroup> cached: array<u32, CACHED>;       // the first keys of the list
var<workgroup> owner: atomic<u32>;               // lowest segment whose running sum exceeds the goal
var<workgroup> last: atomic<u32>;                // highest segment that has anything

fn chunk_length(list: List, chunk: u32) -> u32 {
    if (list.whole) {
        return min(CHUNK, params.width - chunk * CHUNK);
    }
    return u32(sums[2u * (list.output * params.parts + chunk) + 1u].z);
}

fn chunk_key(list: List, chunk: u32, i: u32) -> u32 {
    let at = list.output * params.width + chunk * CHUNK + i;
    if (list.whole) {
        return key_of(logits[at]);
    }
    return gathered[at];
}

// Key i of the list: in the last chunk that starts at i or before.
fn look_up(list: List, i: u32) -> u32 {
    var chunk = 0u;
    for (var step = WG / 2u; step > 0u; step = step / 2u) {
        chunk = select(chunk, chunk + step, starts[chunk + step] <= i);
    }
    return chunk_key(list, chunk, i - starts[chunk]);
}

fn key_at(list: List, i: u32) -> u32 {
    if (i < CACHED) {
        return cached[i];
    }
    return look_up(list, i);
}

fn list_of(output: u32, whole: bool, lane: u32) -> List {
    let there = lane < params.parts;
    let index = 2u * (output * params.parts + min(lane, params.parts - 1u));
    let weights = select(vec4<f32>(), sums[index], there);
    let counts = select(vec4<f32>(), sums[index + 1u], there);
    let totals = workgroup_sum(vec4<f32>(weights.xy, counts.xy), lane);
    var list = List(output, whole, 0u, totals.xz, totals.yw);
    var mine = 0u;
    if (there) {
        mine = chunk_length(list, lane);
    }
    scan(vec4<f32>(f32(mine)), lane);
    starts[lane] = u32(sum_before(lane).x);
    list.length = u32(running[WG - 1u].x);
    if (whole) {
        list.above = vec2<f32>();
    }
    workgroupBarrier();
    for (var i = lane; i < min(list.length, CACHED); i = i + WG) {
        cached[i] = look_up(list, i);
    }
    workgroupBarrier();
    return list;
}

// The highest key t for which the sum over all keys ≥ t reaches the goal: a number of keys, or a weight. A quarter of
// the keys that it can be is left each time. Where the goal is not reached: the lowest of them.
fn threshold(list: List, counting: bool, goal: f32, range: vec2<u32>, span: Span, lane: u32) -> u32 {
    if (lane == 0u) {
        limits = range;
    }
    let above = select(list.above.x, list.above.y, counting);
    var lowest = range.x;
    loop {
        let now = workgroupUniformLoad(&limits);
        lowest = now.x;
        if (now.x >= now.y) {
            break;
        }
        let quarter = (now.y - now.x) / 4u + 1u;
        let pivots = vec3<u32>(now.x) + quarter * vec3<u32>(1u, 2u, 3u);
        var mine = vec3<f32>();
        for (var i = lane; i < list.length; i = i + WG) {
            let key = key_at(list, i);
            if (key >= pivots.x) {
                var value = 1.0;
                if (!counting) {
                    value = weight_of(span, key);
                }
                mine = mine + select(vec3<f32>(), vec3<f32>(value), vec3<u32>(key) >= pivots);
            }
        }
        let reached = workgroup_sum(vec4<f32>(mine, 0.0), lane).xyz + vec3<f32>(above) >= vec3<f32>(goal);
        if (lane == 0u) {
            let first = now.x + quarter * dot(select(vec3<u32>(), vec3<u32>(1u), reached), vec3<u32>(1u));
            limits = vec2<u32>(first, min(now.y, first + quarter - 1u));
        }
    }
    return lowest;
}

// The threshold of top_k and top_p.
fn found_in(list: List, given: Settings, span: Span, lane: u32) -> Found {
    var mine = vec2<u32>();
    for (var i = lane; i < list.length; i = i + WG) {
        let key = key_at(list, i);
        if (key >= span.floor) {
            mine = max(mine, vec2<u32>(key, ~key));
        }
    }
    let extent = workgroup_extent(mine, lane);
    var range = vec2<u32>(min(~extent.y, extent.x), extent.x);  // of an empty list: 0, 0
    var found = Found(span.floor, true);
    let wanted = f32(given.top_k);
    let counted = wants_top_k(given) && wanted <= list.all.y;
    if (wants_top_k(given)) {
        let key = threshold(list, true, wanted, range, span, lane);
        if (counted) {
            found.lowest = key;
            found.sure = list.above.y < wanted && wanted <= list.above.y + f32(list.length);
            range.x = key;
        }
    }
    if (wants_top_p(given)) {
        var left = 0.0;
        for (var i = lane; i < list.length; i = i + WG) {
            let key = key_at(list, i);
            if (key >= max(range.x, span.floor)) {
                left = left + weight_of(span, key);
            }
        }
        let reached = list.above.x + workgroup_sum(vec4<f32>(left), lane).x;
        let goal = max(given.top_p * select(list.all.x, reached, counted), LEAST);
        let complete = counted || list.whole || list.above.y + f32(list.length) == list.all.y;
        found.sure = found.sure && list.above.x < goal && (complete || reached >= goal);
        found.lowest = max(found.lowest, threshold(list, false, goal, range, span, lane));
    }
    return found;
}

// Segments of `lanes` lanes each: the first one with which the running sum exceeds u · total, or exceeds what is due.
// Rounding may put that past the end: then it is the last segment that has anything.
fn placed(sum: f32, lanes: u32, u: f32, due: f32, lane: u32) -> Place {
    if (lane == 0u) {
        atomicStore(&owner, WG);
        atomicStore(&last, 0u);
    }
    scan(vec4<f32>(sum), lane);
    let goal = max(u * running[WG - 1u].x, due);
    let segment = lane / lanes;
    if (sum > 0.0) {  // sums of different lanes round differently: an empty segment must not win by that
        atomicMax(&last, segment);
        if (running[segment * lanes + lanes - 1u].x > goal) {
            atomicMin(&owner, segment);
        }
    }
    workgroupBarrier();
    let chosen = min(atomicLoad(&owner), atomicLoad(&last));
    let place = Place(chosen, max(goal - sum_before(chosen * lanes).x, 0.0));
    workgroupBarrier();  // all have read
    return place;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let output = group.x + group.y * groups.x;
    if (lane == 0u) {
        outputs_there = batch[0].y;
    }
    if (output >= workgroupUniformLoad(&outputs_there)) {
        return;
    }
    let given = settings_of(output);
    let large = 2u * output * params.parts;
    let span = span_of(given, (u32(sums[large].w) << 16u) | u32(sums[large + 1u].w));
    var lowest = max(span.floor, min_p_floor(given, span.top));
    var list = List(output, false, 0u, vec2<f32>(), vec2<f32>());
    if (searches(given)) {
        for (var attempt = 0u; attempt < 2u; attempt = attempt + 1u) {
            list = list_of(output, attempt == 1u, lane);
            let found = found_in(list, given, span, lane);
            if (lane == 0u) {
                sure = select(0u, 1u, found.sure);
            }
            if (workgroupUniformLoad(&sure) == 1u || attempt == 1u) {
                lowest = max(lowest, found.lowest);
                break;
            }
        }
    }
    let chunk = lane / params.lanes;
    var sum = 0.0;
    if (chunk < params.parts) {
        for (var i = lane % params.lanes; i < chunk_length(list, chunk); i = i + params.lanes) {
            let key = chunk_key(list, chunk, i);
            if (key >= lowest) {
                sum = sum + weight_of(span, key);
            }
        }
        if (lane % params.lanes == 0u && !list.whole) {
            sum = sum + sums[2u * (output * params.parts + chunk)].z;
        }
    }
    var u = 0.0;
    if (given.temperature > 0.0) {
        u = uniform_of(given.seed, batch[1u + given.row].y);
    }
    let inside = placed(sum, params.lanes, u, 0.0, lane);
    // The lanes share out the chunk, each with neighbours.
    let count = CHUNK / WG;
    let first = inside.segment * CHUNK + lane * count;
    let end = min(first + count, params.width);
    var total = 0.0;
    for (var i = first; i < end; i = i + 1u) {
        let key = key_of(logits[output * params.width + i]);
        if (key >= lowest) {
            total = total + weight_of(span, key);
        }
    }
    let place = placed(total, 1u, 0.0, inside.due, lane);
    if (lane == place.segment) {
        var token = 0u;
        var reached = 0.0;
        for (var i = first; i < end && reached <= place.due; i = i + 1u) {
            let key = key_of(logits[output * params.width + i]);
            if (key >= lowest) {
                reached = reached + weight_of(span, key);
                token = i;
            }
        }
        tokens[given.slot] = token;
        count_token(given.slot, token);
        move_on(given.row, given.slot);
    }
}
