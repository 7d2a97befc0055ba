// For each row t, split of its keys and query head h, over the keys c of the split that the row sees
//   stats[t, h, split] = (m, l) = (max_c score, Σ_c exp(score − m));  partial[t, h, split, d] = Σ_c exp(score − m) · v[c, d]
// as attention_split does, for a cache of f16 that is read in octets: 16 bytes a lane. LANES_PER_KEY lanes share a key and
// its value, and everything of KEYS / (WG / LANES_PER_KEY) keys stays in registers of a lane: all loads are issued before
// the first is used, and subgroups meet once, at the end. A workgroup owns one kv head and one split of a row's keys, a
// chunk of at most KEYS or several, and takes the GROUP query heads of it four at a time.
// Grid: one workgroup per (row, kv head, split), folded; with a smaller one, of whole rows, each takes every so many-th row.
// Needs QUADS even and a multiple of 2 · LANES_PER_KEY, LANES_PER_KEY a power of two from 4 to SUBGROUP, subgroups of
// SUBGROUP consecutive lanes, KEYS a multiple of WG / LANES_PER_KEY, chunks of whole subgroups' keys. attention_merge joins
// the splits.

const WG: u32 = 256u;
const KEYS: u32 = 128u;
const GROUP: u32 = 4u;     // query heads per kv head
const QUADS: u32 = 16u;    // D / 4
const SUBGROUP: u32 = 32u;
const LANES_PER_KEY: u32 = 8u;
const OCTETS: u32 = QUADS / 2u;
const OWN: u32 = OCTETS / LANES_PER_KEY;       // octets of a key that a lane has
const KEYS_AT_ONCE: u32 = WG / LANES_PER_KEY;  // keys that are read at once
const STEPS: u32 = KEYS / KEYS_AT_ONCE;        // keys of a lane
const SUBGROUPS: u32 = WG / SUBGROUP;
const LOWEST: f32 = -3.0e38;

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;              // [tokens, kv_heads · GROUP, QUADS]
@group(0) @binding(1) var<storage, read> k_cache: array<vec4<u32>>;        // [pool rows, kv_heads, OCTETS] of f16
@group(0) @binding(2) var<storage, read> v_cache: array<vec4<u32>>;        // [pool rows, kv_heads, OCTETS] of f16
@group(0) @binding(3) var<storage, read> batch: array<vec4<u32>>;          // [1 + tokens]
@group(0) @binding(4) var<storage, read_write> partial: array<vec4<f32>>;  // [rows, kv_heads · GROUP, splits, QUADS]
@group(0) @binding(5) var<storage, read_write> stats: array<vec2<f32>>;    // [rows, kv_heads · GROUP, splits]
@group(0) @binding(6) var<uniform> params: Params;

var<workgroup> sums: array<vec4<f32>, SUBGROUPS * 4u * QUADS>;  // of values, of each subgroup and head
var<workgroup> tops: array<vec2<f32>, SUBGROUPS * 4u>;          // (m, l) of each subgroup and head

fn pool_rows() -> u32 {
    return arrayLength(&k_cache) / (params.kv_heads * OCTETS);
}

fn low(octet: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(octet.x), unpack2x16float(octet.y));
}

fn high(octet: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(octet.z), unpack2x16float(octet.w));
}

// Eight values of four heads.
struct Heads {
    a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>,  // the first four of each head
    e: vec4<f32>, f: vec4<f32>, g: vec4<f32>, h: vec4<f32>,  // the second four
}

fn dots(query: Heads, octet: vec4<u32>) -> vec4<f32> {
    let x = low(octet);
    let y = high(octet);
    return vec4<f32>(
        dot(query.a, x) + dot(query.e, y), dot(query.b, x) + dot(query.f, y),
        dot(query.c, x) + dot(query.g, y), dot(query.d, x) + dot(query.h, y),
    );
}

fn added(sum: Heads, weights: vec4<f32>, octet: vec4<u32>) -> Heads {
    let x = low(octet);
    let y = high(octet);
    return Heads(
        sum.a + weights.x * x, sum.b + weights.y * x, sum.c + weights.z * x, sum.d + weights.w * x,
        sum.e + weights.x * y, sum.f + weights.y * y, sum.g + weights.z * y, sum.h + weights.w * y,
    );
}

fn query_quad(at: u32, head: u32, quad: u32) -> vec4<f32> {
    if (GROUP % 4u == 0u) {
        return q[at + head * QUADS + quad];
    }
    return select(vec4<f32>(), q[at + min(head, GROUP - 1u) * QUADS + quad], head < GROUP);
}

// The lanes of a subgroup that have the same octet add up what they have; each keeps some of the heads where it can.
fn store_sums(sum: Heads, at: u32, octet: u32, lane: u32, again: bool) {
    var all = sum;
    for (var offset = LANES_PER_KEY; offset * 4u < SUBGROUP; offset = offset * 2u) {
        all = Heads(
            all.a + other(all.a, offset), all.b + other(all.b, offset), all.c + other(all.c, offset), all.d + other(all.d, offset),
            all.e + other(all.e, offset), all.f + other(all.f, offset), all.g + other(all.g, offset), all.h + other(all.h, offset),
        );
    }
    if (SUBGROUP == LANES_PER_KEY) {
        store_head(at, octet, all.a, all.e, again);
        store_head(at + 1u, octet, all.b, all.f, again);
        store_head(at + 2u, octet, all.c, all.g, again);
        store_head(at + 3u, octet, all.d, all.h, again);
        return;
    }
    const HALF: u32 = SUBGROUP / 2u;
    let upper = lane / HALF % 2u == 1u;
    let a = select(all.a, all.c, upper) + other(select(all.c, all.a, upper), HALF);
    let b = select(all.b, all.d, upper) + other(select(all.d, all.b, upper), HALF);
    let e = select(all.e, all.g, upper) + other(select(all.g, all.e, upper), HALF);
    let f = select(all.f, all.h, upper) + other(select(all.h, all.f, upper), HALF);
    let pair = at + select(0u, 2u, upper);
    if (SUBGROUP == 2u * LANES_PER_KEY) {
        store_head(pair, octet, a, e, again);
        store_head(pair + 1u, octet, b, f, again);
        return;
    }
    const QUARTER: u32 = SUBGROUP / 4u;
    let second = lane / QUARTER % 2u == 1u;
    let low_quad = select(a, b, second) + other(select(b, a, second), QUARTER);
    let high_quad = select(e, f, second) + other(select(f, e, second), QUARTER);
    if (lane % QUARTER < LANES_PER_KEY) {  // others have the same
        store_head(pair + select(0u, 1u, second), octet, low_quad, high_quad, again);
    }
}

fn store_head(at: u32, octet: u32, low_quad: vec4<f32>, high_quad: vec4<f32>, again: bool) {
    let i = at * QUADS + 2u * octet;
    if (LONG_ROWS && again) {
        sums[i] = low_quad * now[at % 4u] + sums[i] * before[at % 4u];
        sums[i + 1u] = high_quad * now[at % 4u] + sums[i + 1u] * before[at % 4u];
    } else {
        sums[i] = low_quad;
        sums[i + 1u] = high_quad;
    }
}

// For four heads: the factors of the sums of a chunk, and of those before it.
var<private> now: vec4<f32>;
var<private> before: vec4<f32>;

// Adds the first `count` keys of a chunk that begins in row `start` of the pool. `again`: the split had chunks before. Their
// sums are in workgroup memory: in registers they would leave room for half as many workgroups.
fn attend_chunk(at_q: u32, i: u32, start: u32, chunk: u32, count: u32, kv_head: u32, lane: u32, again: bool) {
    // Of a chunk, a subgroup has consecutive keys.
    let own_key = lane / SUBGROUP * (KEYS / SUBGROUPS) + lane % SUBGROUP / LANES_PER_KEY;
    let part = lane % LANES_PER_KEY;
    let row = params.kv_heads * OCTETS;
    let base = (start + own_key % chunk) * row + kv_head * OCTETS + part;
    let last = (start + count - 1u) * row + kv_head * OCTETS + part;
    // A page is read to its end, whatever is there; without pages the pool may end before.
    let end = select(last, 0xFFFFFFFFu, PAGED);
    var keys: array<vec4<u32>, STEPS * OWN>;
    var values: array<vec4<u32>, STEPS * OWN>;
    for (var s = 0u; s < STEPS; s = s + 1u) {
        for (var o = 0u; o < OWN; o = o + 1u) {
            keys[s * OWN + o] = k_cache[min(base + s * (SUBGROUP / LANES_PER_KEY) * row, end) + o * LANES_PER_KEY];
        }
    }
    for (var s = 0u; s < STEPS; s = s + 1u) {
        for (var o = 0u; o < OWN; o = o + 1u) {
            values[s * OWN + o] = v_cache[min(base + s * (SUBGROUP / LANES_PER_KEY) * row, end) + o * LANES_PER_KEY];
        }
    }
    var query: array<Heads, OWN>;
    for (var o = 0u; o < OWN; o = o + 1u) {
        let quad = 2u * (part + o * LANES_PER_KEY);
        query[o] = Heads(
            query_quad(at_q, i, quad), query_quad(at_q, i + 1u, quad),
            query_quad(at_q, i + 2u, quad), query_quad(at_q, i + 3u, quad),
            query_quad(at_q, i, quad + 1u), query_quad(at_q, i + 1u, quad + 1u),
            query_quad(at_q, i + 2u, quad + 1u), query_quad(at_q, i + 3u, quad + 1u),
        );
    }
    var scores: array<f32, STEPS>;
    var top = LOWEST;  // of one head, as own_head gives them to lanes
    for (var s = 0u; s < STEPS; s = s + 1u) {
        var all = vec4<f32>();
        for (var o = 0u; o < OWN; o = o + 1u) {
            all = all + dots(query[o], keys[s * OWN + o]);
        }
        let seen = own_key + s * (SUBGROUP / LANES_PER_KEY) < count && within(own_key + s * (SUBGROUP / LANES_PER_KEY));
        scores[s] = select(LOWEST, capped(params.scale * own_head(all, lane)), seen);
        top = max(top, scores[s]);
    }
    for (var offset = LANES_PER_KEY; offset < SUBGROUP; offset = offset * 2u) {
        top = max(top, subgroupShuffleXor(top, offset));
    }
    var total = 0.0;
    var sum: array<Heads, OWN>;
    for (var o = 0u; o < OWN; o = o + 1u) {
        sum[o] = Heads();
    }
    for (var s = 0u; s < STEPS; s = s + 1u) {
        let seen = own_key + s * (SUBGROUP / LANES_PER_KEY) < count && within(own_key + s * (SUBGROUP / LANES_PER_KEY));
        let weight = select(0.0, exp(scores[s] - top), seen);
        total = total + weight;
        let weights = all_heads(weight, lane);
        for (var o = 0u; o < OWN; o = o + 1u) {
            sum[o] = added(sum[o], weights, select(vec4<u32>(), values[s * OWN + o], seen));
        }
    }
    for (var offset = LANES_PER_KEY; offset < SUBGROUP; offset = offset * 2u) {
        total = total + subgroupShuffleXor(total, offset);
    }
    let at = lane / SUBGROUP * 4u;
    let own_stat = at + lane % 2u * 2u + lane / 2u % 2u;
    if (LONG_ROWS && again) {
        let stat = tops[own_stat];
        let largest = max(top, stat.x);
        let kept = exp(stat.x - largest);
        let factor = exp(top - largest);
        top = largest;
        total = total * factor + stat.y * kept;
        now = all_heads(factor, lane);
        before = all_heads(kept, lane);
        workgroupBarrier();  // tops may be written again
    }
    if (lane % SUBGROUP < 4u) {
        tops[own_stat] = vec2<f32>(top, total);
    }
    for (var o = 0u; o < OWN; o = o + 1u) {
        store_sums(sum[o], at, part + o * LANES_PER_KEY, lane, again);
    }
    workgroupBarrier();
}

fn attend_split(t: u32, kv_head: u32, split: u32, lane: u32) {
    let row = batch_row(t);
    let last = min(row.position, pool_rows() - 1u);
    let begin = first_chunk(last);
    let length = last + 1u - begin;
    let chunk = chunk_keys(length);
    let first = split * chunks_per_split(length) * chunk;
    if (first >= length) {
        return;
    }
    let end = min(first + chunks_per_split(length) * chunk, length);
    let at_q = (t * params.kv_heads + kv_head) * GROUP * QUADS;
    for (var i = 0u; i < GROUP; i = i + 4u) {
        for (var at = first; at < end; at = at + chunk) {
            hidden = hidden_keys(last, begin + at);
            attend_chunk(at_q, i, pool_row(row.pages, begin + at), chunk, min(chunk, length - at), kv_head, lane, at != first);
            if (!LONG_ROWS) {
                break;  // a split is one chunk
            }
        }
        let base = ((t - params.first) * params.kv_heads + kv_head) * GROUP + i;
        for (var j = lane; j < 4u * QUADS; j = j + WG) {
            let head = j / QUADS;
            var largest = tops[head].x;
            for (var k = 1u; k < SUBGROUPS; k = k + 1u) {
                largest = max(largest, tops[k * 4u + head].x);
            }
            var value = vec4<f32>();
            var l = 0.0;
            for (var k = 0u; k < SUBGROUPS; k = k + 1u) {
                let stat = tops[k * 4u + head];
                let factor = exp(stat.x - largest);
                l = l + factor * stat.y;
                value = value + factor * sums[(k * 4u + head) * QUADS + j % QUADS];
            }
            if (i + head < GROUP) {
                let at = (base + head) * params.splits + split;
                partial[at * QUADS + j % QUADS] = value;
                if (j % QUADS == 0u) {
                    stats[at] = vec2<f32>(largest, l);
                }
            }
        }
        if (!ONE_ROW || GROUP > 4u) {
            workgroupBarrier();  // sums and tops may be written again
        }
    }
}
