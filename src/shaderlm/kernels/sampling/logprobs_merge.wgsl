// out[r, 0] = (token, its log-probability), out[r, 1 …] = the most likely tokens with theirs, best first
// The log-probability of token i is logits[r, i] − ln Σ exp(logits[r, :]); −inf for NaN, too.
// Grid: one workgroup per row of logits, folded.

const WG: u32 = 256u;
const MOST: u32 = 20u;  // that a row may want
const MINUS_INFINITY: u32 = 0xff800000u;

struct Params {
    rows: u32,
    width: u32,
    parts: u32,  // chunks per row
}

@group(0) @binding(0) var<storage, read> logits: array<u32>;              // [rows, width], the bits of f32
@group(0) @binding(1) var<storage, read> outputs: array<vec4<u32>>;       // [rows, 2]
@group(0) @binding(2) var<storage, read> adjustments: array<vec4<u32>>;   // [rows, 2]
@group(0) @binding(3) var<storage, read> tokens: array<u32>;              // [sequence slots]
@group(0) @binding(4) var<storage, read> bests: array<vec2<u32>>;         // [rows, parts, MOST]: key, index
@group(0) @binding(5) var<storage, read> sums: array<f32>;                // [rows, parts]
@group(0) @binding(6) var<storage, read_write> out: array<vec2<u32>>;     // [rows, 1 + MOST]: token, bits of f32
@group(0) @binding(7) var<uniform> params: Params;

fn logprob(key: u32, top: f32, total: f32) -> u32 {
    return select(MINUS_INFINITY, bitcast<u32>(value_of(key) - top - log(total)), key >= LOWEST);
}

// The best of a lane's share of the chunks' best that comes after another one.
fn next_best(first: u32, wanted: u32, after: Best, lane: u32) -> Best {
    var best = Best(0u, NOT_WANTED);
    for (var i = lane; i < params.parts * wanted; i = i + WG) {
        let entry = bests[(first + i / wanted) * MOST + i % wanted];
        if (entry.x < after.key || (entry.x == after.key && entry.y > after.index)) {
            best = better(best, Best(entry.x, entry.y));
        }
    }
    return best;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if (row >= output_count()) {
        return;
    }
    let given = adjustment_of(row);
    if (given.logprobs == NOT_WANTED) {
        return;
    }
    let first = row * params.parts;
    var best = Best(0u, NOT_WANTED);
    for (var i = lane; i < params.parts; i = i + WG) {
        best = better(best, Best(bests[(first + i) * MOST].x, bests[(first + i) * MOST].y));
    }
    let top = value_of(best_of_workgroup(best, lane).key);
    var sum = 0.0;
    for (var i = lane; i < params.parts; i = i + WG) {
        let key = bests[(first + i) * MOST].x;
        if (key >= LOWEST) {
            sum = sum + sums[first + i] * exp(value_of(key) - top);
        }
    }
    let total = workgroup_sum(vec4<f32>(sum), lane).x;
    if (lane == 0u) {
        let token = tokens[outputs[2u * row].y];
        let key = key_of(logits[row * params.width + min(token, params.width - 1u)]);
        out[row * (1u + MOST)] = vec2<u32>(token, logprob(key, top, total));
    }
    // Each chunk has as many as the row wants, or all that it has.
    let wanted = min(given.logprobs, min(MOST, params.width));
    if (wanted == 0u) {
        return;
    }
    var mine = next_best(first, wanted, Best(0xffffffffu, 0u), lane);
    for (var n = 0u; n < wanted; n = n + 1u) {
        let chosen = best_of_workgroup(mine, lane);
        if (lane == 0u) {
            out[row * (1u + MOST) + 1u + n] = vec2<u32>(chosen.index, logprob(chosen.key, top, total));
        }
        if (mine.index == chosen.index && mine.key > 0u) {
            mine = next_best(first, wanted, chosen, lane);
        }
        workgroupBarrier();  // the arrays of best_of_workgroup are used again
    }
}
