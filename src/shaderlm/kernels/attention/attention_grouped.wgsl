// out[t, h, d] = Σ_c exp(score_c − m) · v[c, d] / Σ_c exp(score_c − m),   score_c = scale · Σ_d q[t, h, d] · k[c, d], m = max score
// over the keys c that row t sees, as attention_single_pass does, for many rows: a workgroup owns one kv head
// of a row and takes four of its GROUP query heads together, so that each key and value is read once for them.
// LANES_PER_KEY lanes share a key and its value, of which each has OWN units of 16 bytes or less, every LANES_PER_KEY-th. A
// subgroup takes BLOCK keys at a time, which lie in one page. All that it knows of them stays in registers, with a running
// maximum for each lane; subgroups meet once, at the end.
// Grid: one workgroup per (row, kv head, four query heads), folded. With a smaller one, of whole rows, each takes every so
// many-th row, which EACH_ROW rules out.
// Needs subgroups of SUBGROUP consecutive lanes, LANES_PER_KEY a power of two from 4 to SUBGROUP, LANES_PER_KEY · OWN · UNIT
// ≥ QUADS, BLOCK a divisor of PAGE, QUADS a multiple of UNIT.

const WG: u32 = 256u;
const SUBGROUP: u32 = 32u;
const LANES_PER_KEY: u32 = 8u;
const QUADS: u32 = 16u;         // D / 4
const OWN: u32 = 1u;
const STEPS: u32 = 4u;          // keys of a lane that are asked for at once
const GROUP: u32 = 4u;          // query heads per kv head
const EACH_ROW: bool = false;   // the grid has workgroups for every row
const KEYS_AT_ONCE: u32 = SUBGROUP / LANES_PER_KEY;
const BLOCK: u32 = STEPS * KEYS_AT_ONCE;
const SUBGROUPS: u32 = WG / SUBGROUP;
const FOURS: u32 = (GROUP + 3u) / 4u;
const WHOLE: bool = LANES_PER_KEY * OWN * UNIT == QUADS;  // no lane has units past the end of a head
const LOWEST: f32 = -3.0e38;

struct Params {
    kv_heads: u32,
    max_keys: u32,  // rows that see more are left alone
    skipped: u32,   // so are rows with a bit of this in their `pages`
    scale: f32,
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;          // [tokens, kv_heads · GROUP, QUADS]
@group(0) @binding(1) var<storage, read> k_cache: array<cache_unit>;   // [pool rows, kv_heads, QUADS / UNIT]
@group(0) @binding(2) var<storage, read> v_cache: array<cache_unit>;   // [pool rows, kv_heads, QUADS / UNIT]
@group(0) @binding(3) var<storage, read> batch: array<vec4<u32>>;      // [1 + tokens]
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;  // [tokens, kv_heads · GROUP, QUADS]
@group(0) @binding(5) var<uniform> params: Params;

var<workgroup> sums: array<vec4<f32>, SUBGROUPS * 4u * QUADS>;  // of values, of each subgroup and head
var<workgroup> tops: array<vec2<f32>, SUBGROUPS * 4u>;          // (m, l) of each subgroup and head

fn pool_rows() -> u32 {
    return arrayLength(&k_cache) / (params.kv_heads * (QUADS / UNIT));
}

// One quad of four heads.
struct Heads {
    a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>,
}

fn scaled(heads: Heads, by: vec4<f32>) -> Heads {
    return Heads(heads.a * by.x, heads.b * by.y, heads.c * by.z, heads.d * by.w);
}

fn added(heads: Heads, weights: vec4<f32>, x: vec4<f32>) -> Heads {
    return Heads(heads.a + weights.x * x, heads.b + weights.y * x, heads.c + weights.z * x, heads.d + weights.w * x);
}

fn dots(heads: Heads, x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(dot(heads.a, x), dot(heads.b, x), dot(heads.c, x), dot(heads.d, x));
}

fn query_quad(at: u32, head: u32, quad: u32) -> vec4<f32> {
    let value = q[at + min(head, GROUP - 1u) * QUADS + min(quad, QUADS - 1u)];
    return select(vec4<f32>(), value, (WHOLE || quad < QUADS) && (GROUP % 4u == 0u || head < GROUP));
}

// The lanes of a subgroup that have the same quad add up what they have; each keeps some of the heads where it can.
fn store_sums(own: Heads, at: u32, quad: u32, lane: u32) {
    var all = own;
    for (var offset = LANES_PER_KEY; offset * 4u < SUBGROUP; offset = offset * 2u) {
        all = Heads(all.a + other(all.a, offset), all.b + other(all.b, offset), all.c + other(all.c, offset), all.d + other(all.d, offset));
    }
    if (KEYS_AT_ONCE == 1u) {
        store_head(at, quad, all.a);
        store_head(at + 1u, quad, all.b);
        store_head(at + 2u, quad, all.c);
        store_head(at + 3u, quad, all.d);
        return;
    }
    const HALF: u32 = SUBGROUP / 2u;
    let upper = lane / HALF % 2u == 1u;
    let a = select(all.a, all.c, upper) + other(select(all.c, all.a, upper), HALF);
    let b = select(all.b, all.d, upper) + other(select(all.d, all.b, upper), HALF);
    let pair = at + select(0u, 2u, upper);
    if (KEYS_AT_ONCE == 2u) {
        store_head(pair, quad, a);
        store_head(pair + 1u, quad, b);
        return;
    }
    const QUARTER: u32 = SUBGROUP / 4u;
    let second = lane / QUARTER % 2u == 1u;
    let one = select(a, b, second) + other(select(b, a, second), QUARTER);
    if (lane % QUARTER < LANES_PER_KEY) {  // others have the same
        store_head(pair + select(0u, 1u, second), quad, one);
    }
}

fn store_head(at: u32, quad: u32, value: vec4<f32>) {
    if (WHOLE || quad < QUADS) {
        sums[at * QUADS + quad] = value;
    }
}

// Does a row see key c, of those up to `last`?
fn sees(c: u32, least: u32, last: u32) -> bool {
    return (c <= last) & (WINDOW == 0u || c >= least);
}

fn attend_row(t: u32, row: Row, kv_head: u32, four: u32, lane: u32) {
    let last = min(row.position, pool_rows() - 1u);
    let least = first_key(last);
    let begin = least / BLOCK * BLOCK;
    let part = lane % LANES_PER_KEY;
    let own_key = lane % SUBGROUP / LANES_PER_KEY;
    let sub = lane / SUBGROUP;
    const UNITS: u32 = QUADS / UNIT;
    let row_units = params.kv_heads * UNITS;
    var keys: array<array<cache_unit, OWN>, STEPS>;  // registers
    var values: array<array<cache_unit, OWN>, STEPS>;  // registers
    var query: array<array<Heads, UNIT>, OWN>;  // registers
    var sum: array<array<Heads, UNIT>, OWN>;  // registers
    var scores: array<f32, STEPS>;  // registers
    // A subgroup without keys reads the last ones that there are. A page is read to its end, whatever is there; without pages
    // the pool may end before.
    let last_block = last / BLOCK * BLOCK;
    let end = select(last, 0xFFFFFFFFu, PAGED);
    let at_q = ((t * params.kv_heads + kv_head) * GROUP) * QUADS;
    for (var o = 0u; o < OWN; o = o + 1u) {  // unrolled
        for (var i = 0u; i < UNIT; i = i + 1u) {  // unrolled
            let quad = UNIT * (part + o * LANES_PER_KEY) + i;
            query[o][i] = Heads(
                query_quad(at_q, four, quad), query_quad(at_q, four + 1u, quad),
                query_quad(at_q, four + 2u, quad), query_quad(at_q, four + 3u, quad),
            );
            sum[o][i] = Heads();
        }
    }
    var top = LOWEST;  // of one head, as own_head gives them to lanes, and of the keys of this lane
    var total = 0.0;
    var start = pool_row(row.pages, min(begin + sub * BLOCK, last_block));
    for (var first = begin; first <= last; first = first + SUBGROUPS * BLOCK) {
        for (var s = 0u; s < STEPS; s = s + 1u) {  // unrolled
            let base = min(start + own_key + s * KEYS_AT_ONCE, end) * row_units + kv_head * UNITS;
            for (var o = 0u; o < OWN; o = o + 1u) {  // unrolled
                keys[s][o] = k_cache[base + min(part + o * LANES_PER_KEY, UNITS - 1u)];
            }
        }
        for (var s = 0u; s < STEPS; s = s + 1u) {  // unrolled
            let base = min(start + own_key + s * KEYS_AT_ONCE, end) * row_units + kv_head * UNITS;
            for (var o = 0u; o < OWN; o = o + 1u) {  // unrolled
                values[s][o] = v_cache[base + min(part + o * LANES_PER_KEY, UNITS - 1u)];
            }
        }
        start = pool_row(row.pages, min(first + (SUBGROUPS + sub) * BLOCK, last_block));  // of the next keys, while these come
        let before = top;
        for (var s = 0u; s < STEPS; s = s + 1u) {  // unrolled
            var all = vec4<f32>();
            for (var o = 0u; o < OWN; o = o + 1u) {  // unrolled
                for (var i = 0u; i < UNIT; i = i + 1u) {  // unrolled
                    all = all + dots(query[o][i], unit_quad(keys[s][o], i));
                }
            }
            let seen = sees(first + sub * BLOCK + own_key + s * KEYS_AT_ONCE, least, last);
            scores[s] = select(LOWEST, capped(params.scale * own_head(all, lane)), seen);
            top = max(top, scores[s]);
        }
        if (first > begin) {
            let kept = exp(before - top);
            total = total * kept;
            let factors = all_heads(kept, lane);
            for (var o = 0u; o < OWN; o = o + 1u) {  // unrolled
                for (var i = 0u; i < UNIT; i = i + 1u) {  // unrolled
                    sum[o][i] = scaled(sum[o][i], factors);
                }
            }
        }
        for (var s = 0u; s < STEPS; s = s + 1u) {  // unrolled
            let seen = sees(first + sub * BLOCK + own_key + s * KEYS_AT_ONCE, least, last);
            let weight = select(0.0, exp(scores[s] - top), seen);
            total = total + weight;
            let weights = all_heads(weight, lane);
            for (var o = 0u; o < OWN; o = o + 1u) {  // unrolled
                let value = select(cache_unit(), values[s][o], seen);  // others may be anything, NaN too
                for (var i = 0u; i < UNIT; i = i + 1u) {  // unrolled
                    sum[o][i] = added(sum[o][i], weights, unit_quad(value, i));
                }
            }
        }
    }
    // What the lanes of a subgroup have, with the largest score of them all.
    var largest = top;
    for (var offset = LANES_PER_KEY; offset < SUBGROUP; offset = offset * 2u) {
        largest = max(largest, subgroupShuffleXor(largest, offset));
    }
    let factor = exp(top - largest);
    total = total * factor;
    for (var offset = LANES_PER_KEY; offset < SUBGROUP; offset = offset * 2u) {
        total = total + subgroupShuffleXor(total, offset);
    }
    let at = sub * 4u;
    if (lane % SUBGROUP < 4u) {
        tops[at + lane % 2u * 2u + lane / 2u % 2u] = vec2<f32>(largest, total);
    }
    let factors = all_heads(factor, lane);
    for (var o = 0u; o < OWN; o = o + 1u) {  // unrolled
        for (var i = 0u; i < UNIT; i = i + 1u) {  // unrolled
            store_sums(scaled(sum[o][i], factors), at, UNIT * (part + o * LANES_PER_KEY) + i, lane);
        }
    }
    workgroupBarrier();
    for (var j = lane; j < 4u * QUADS; j = j + WG) {
        let head = j / QUADS;
        var most = tops[head].x;
        for (var k = 1u; k < SUBGROUPS; k = k + 1u) {
            most = max(most, tops[k * 4u + head].x);
        }
        var value = vec4<f32>();
        var l = 0.0;
        if (SINKS) {
            let sink = sink_of(kv_head * GROUP + min(four + head, GROUP - 1u));
            most = max(most, sink);
            l = exp(sink - most);
        }
        for (var k = 0u; k < SUBGROUPS; k = k + 1u) {
            let stat = tops[k * 4u + head];
            let weight = exp(stat.x - most);
            l = l + weight * stat.y;
            value = value + weight * sums[(k * 4u + head) * QUADS + j % QUADS];
        }
        if (four + head < GROUP) {
            out[at_q + (four + head) * QUADS + j % QUADS] = value / l;
        }
    }
}

fn left_alone(row: Row) -> bool {
    return (row.position >= params.max_keys) | ((row.pages & params.skipped) != 0u);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let per_row = params.kv_heads * FOURS;
    let kv_head = index % per_row / FOURS;
    let four = index % FOURS * 4u;
    if (EACH_ROW) {
        let t = index / per_row;
        let row = batch_row(min(t, arrayLength(&batch) - 2u));  // asked for together with the number of rows
        if (t < batch_rows()) {
            if (!left_alone(row)) {
                attend_row(t, row, kv_head, four, lane);
            }
        }
        return;
    }
    let rows_at_once = groups.x * groups.y / per_row;
    if (index < rows_at_once * per_row) {
        var t = next_row(index / per_row, rows_at_once, batch_rows());
        while (t < batch_rows()) {
            attend_row(t, batch_row(t), kv_head, four, lane);
            workgroupBarrier();  // sums and tops may be written again
            t = next_row(t + rows_at_once, rows_at_once, batch_rows());
        }
    }
}
