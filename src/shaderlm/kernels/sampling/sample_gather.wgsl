// Per row and chunk: the keys of the bins in which the threshold lies, and what weighs more than those bins
// Third of four dispatches of sampling. The histogram says in which bins the logit must be that top_k or top_p keeps
// last; keys of these bins are gathered, what is above them is added up. Where nothing is searched for, all is above.
// Grid: one workgroup per (row, chunk), folded. Needs BINS = 4 WG.

const WG: u32 = 256u;
const CHUNK: u32 = 2048u;

struct Params {
    rows: u32,
    width: u32,
    parts: u32,  // chunks per row
    unit: f32,   // parts of the largest weight of a bin, in the histogram
}

@group(0) @binding(0) var<storage, read> logits: array<u32>;              // [rows, width], the bits of f32
@group(0) @binding(1) var<storage, read> outputs: array<vec4<u32>>;       // [rows, 2]
@group(0) @binding(2) var<storage, read> extents: array<vec2<u32>>;       // [rows, parts]
@group(0) @binding(3) var<storage, read> histogram: array<vec4<u32>>;     // [rows, 2, WG]: counts, lacks
@group(0) @binding(4) var<storage, read_write> gathered: array<u32>;      // [rows, width], the first few of each chunk
@group(0) @binding(5) var<storage, read_write> sums: array<vec4<f32>>;    // [rows, parts, 2]: weights, numbers; the largest key
@group(0) @binding(6) var<uniform> params: Params;

struct Bins {
    high: u32,  // the first that is gathered; BINS: none
    low: u32,   // the last
}

var<workgroup> found: array<atomic<u32>, 3u>;
var<workgroup> numbers: array<atomic<u32>, 2u>;  // of logits that have weight and of those above the bins
var<workgroup> bounds: vec2<f32>;  // weight before and with the last bin of top_k

// The lowest bin with which a sum reaches its goal; four bins per lane.
fn report(which: u32, reached: vec4<bool>, lane: u32) {
    if (any(reached)) {
        let first = select(select(select(3u, 2u, reached.z), 1u, reached.y), 0u, reached.x);
        atomicMin(&found[which], 4u * lane + first);
    }
}

fn running_of(v: vec4<f32>) -> vec4<f32> {
    let two = vec2<f32>(v.x, v.x + v.y);
    return vec4<f32>(two, two.y + v.z, two.y + v.z + v.w);
}

// What weights lack is rounded to units, and sums of f32 are rounded: bins are taken a little wide.
fn bins_of(row: u32, given: Settings, step: f32, lane: u32) -> Bins {
    if (lane < 3u) {
        atomicStore(&found[lane], BINS - 1u);
    }
    let bins = vec4<f32>(vec4<u32>(4u * lane) + vec4<u32>(0u, 1u, 2u, 3u));
    let numbers_here = vec4<f32>(histogram[2u * row * WG + lane]);
    let lacks = vec4<f32>(histogram[(2u * row + 1u) * WG + lane]) / params.unit;
    let counts = running_of(numbers_here);
    let weights = (numbers_here - lacks) * exp(-step * bins);
    let weighed = running_of(weights);
    scan(vec4<f32>(counts.w, weighed.w, 0.0, 0.0), lane);
    let before = sum_before(lane);
    let total = running[WG - 1u];
    let counted = wants_top_k(given) && f32(given.top_k) <= total.x;
    if (counted) {
        report(0u, counts + vec4<f32>(before.x) >= vec4<f32>(f32(given.top_k)), lane);
    }
    workgroupBarrier();
    let last = atomicLoad(&found[0]);
    if (lane == last / 4u) {
        let reached = before.y + weighed[last % 4u];
        bounds = vec2<f32>(reached - weights[last % 4u], reached);
    }
    workgroupBarrier();
    var bins_found = Bins(select(BINS, last, counted), last);
    if (wants_top_p(given)) {
        let slack = 1e-5 + 1.0 / params.unit;
        let goal = given.top_p * select(vec2<f32>(total.y), bounds, counted) * vec2<f32>(1.0 - slack, 1.0 + slack);
        report(1u, weighed + vec4<f32>(before.y) >= vec4<f32>(goal.x), lane);
        report(2u, weighed + vec4<f32>(before.y) >= vec4<f32>(goal.y), lane);
        workgroupBarrier();
        bins_found = Bins(atomicLoad(&found[1]), select(atomicLoad(&found[2]), last, counted));
    }
    return bins_found;
}

fn number_of(mask: vec4<bool>) -> u32 {
    return dot(select(vec4<u32>(), vec4<u32>(1u), mask), vec4<u32>(1u));
}

fn gathers(bins: Bins, place: vec4<u32>, there: vec4<bool>) -> vec4<bool> {
    return there & (place >= vec4<u32>(bins.high)) & (place <= vec4<u32>(bins.low));
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let row = index / params.parts;
    if (row >= output_count()) {
        return;
    }
    let given = settings_of(row);
    if (lane < 2u) {
        atomicStore(&numbers[lane], 0u);
    }
    let extent = extent_of(row, lane);  // its barriers are those that the zeros need
    let span = span_of(given, extent.x);
    let scale = scale_of(span, extent);
    let kept = min_p_floor(given, span.top);
    var bins = Bins(BINS, BINS - 1u);
    if (searches(given)) {
        bins = bins_of(row, given, scale.step, lane);
        workgroupBarrier();  // running may be used again
    }
    let first = row * params.width + (index % params.parts) * CHUNK;
    let end = min(first + CHUNK, (row + 1u) * params.width);
    var weights = vec3<f32>();  // of all logits; of those above the bins; of these, what min_p keeps
    var counts = vec2<u32>();   // how many logits have weight, and how many of them are above the bins
    var mine = 0u;              // how many of this lane are gathered
    for (var i = lane; i < CHUNK; i = i + 4u * WG) {
        let keys = four_keys(first + i, end);
        let there = keys >= vec4<u32>(span.floor);
        let place = bins_at(depths_of(span, scale, keys));
        let above = there & (place < vec4<u32>(bins.high));
        let weight = select(vec4<f32>(), weights_of(span, keys), there);
        let weight_above = select(vec4<f32>(), weight, above);
        weights.x = weights.x + dot(weight, vec4<f32>(1.0));
        weights.y = weights.y + dot(weight_above, vec4<f32>(1.0));
        weights.z = weights.z + dot(select(vec4<f32>(), weight_above, keys >= vec4<u32>(kept)), vec4<f32>(1.0));
        counts = counts + vec2<u32>(number_of(there), number_of(above));
        mine = mine + number_of(gathers(bins, place, there));
    }
    atomicAdd(&numbers[0], counts.x);
    atomicAdd(&numbers[1], counts.y);
    scan(vec4<f32>(weights, f32(mine)), lane);
    if (mine > 0u) {
        var to = first + u32(sum_before(lane).w);
        for (var i = lane; i < CHUNK; i = i + 4u * WG) {
            let keys = four_keys(first + i, end);
            let mask = gathers(bins, bins_at(depths_of(span, scale, keys)), keys >= vec4<u32>(span.floor));
            for (var j = 0u; j < 4u; j = j + 1u) {
                if (mask[j]) {
                    gathered[to] = keys[j];
                    to = to + 1u;
                }
            }
        }
    }
    if (lane == 0u) {
        let totals = running[WG - 1u];
        let counted = vec2<f32>(f32(atomicLoad(&numbers[0])), f32(atomicLoad(&numbers[1])));
        sums[2u * index] = vec4<f32>(totals.xyz, f32(span.top >> 16u));  // two halves of the key, which f32 holds exactly
        sums[2u * index + 1u] = vec4<f32>(counted, totals.w, f32(span.top & 0xffffu));
    }
}
