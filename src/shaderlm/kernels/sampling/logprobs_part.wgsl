// Per row and chunk: the largest keys with their indices, best first, and Σ exp(logit − the largest of the chunk)
// logprobs_merge joins the chunks. Grid: one workgroup per (row, chunk), folded.

const WG: u32 = 256u;
const CHUNK: u32 = 2048u;
const MOST: u32 = 20u;  // that a row may want

struct Params {
    rows: u32,
    width: u32,
    parts: u32,  // chunks per row
}

@group(0) @binding(0) var<storage, read> logits: array<u32>;              // [rows, width], the bits of f32
@group(0) @binding(1) var<storage, read> adjustments: array<vec4<u32>>;   // [rows, 2]
@group(0) @binding(2) var<storage, read_write> bests: array<vec2<u32>>;   // [rows, parts, MOST]: key, index
@group(0) @binding(3) var<storage, read_write> sums: array<f32>;          // [rows, parts]
@group(0) @binding(4) var<uniform> params: Params;

var<workgroup> largest: u32;  // key of the chunk

// The best key of a lane that comes after another one.
fn next_best(base: u32, first: u32, end: u32, after: Best) -> Best {
    let steps = vec4<u32>(0u, WG, 2u * WG, 3u * WG);
    var best = Best(0u, NOT_WANTED);
    for (var i = first; i < end; i = i + 4u * WG) {
        let indices = vec4<u32>(i) + steps;
        let keys = min(four_keys(base + i, base + end), vec4<u32>(HIGHEST));
        best = better(best, next_of_four(keys, indices, indices < vec4<u32>(end), after));
    }
    return best;
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
    let given = adjustment_of(row);
    if (given.logprobs == NOT_WANTED) {
        return;
    }
    let base = row * params.width;
    let first = (index % params.parts) * CHUNK;
    let end = min(first + CHUNK, params.width);
    var mine = next_best(base, first + lane, end, Best(0xffffffffu, 0u));
    for (var n = 0u; n < clamp(given.logprobs, 1u, MOST); n = n + 1u) {  // the first is the chunk's largest
        let best = best_of_workgroup(mine, lane);
        if (lane == 0u) {
            bests[index * MOST + n] = vec2<u32>(best.key, best.index);
            largest = select(largest, best.key, n == 0u);
        }
        if (mine.index == best.index && mine.key > 0u) {
            mine = next_best(base, first + lane, end, best);
        }
        workgroupBarrier();  // the arrays of best_of_workgroup are used again
    }
    let top = value_of(workgroupUniformLoad(&largest));
    var sum = 0.0;
    for (var i = first + lane; i < end; i = i + 4u * WG) {
        let keys = four_keys(base + i, base + end);
        let weights = exp(values_of(keys) - vec4<f32>(top));
        sum = sum + dot(select(vec4<f32>(), weights, keys >= vec4<u32>(LOWEST)), vec4<f32>(1.0));
    }
    let total = workgroup_sum(vec4<f32>(sum), lane);
    if (lane == 0u) {
        sums[index] = total.x;
    }
}
