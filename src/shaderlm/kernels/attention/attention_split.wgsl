// For each row t, split of its keys and query head h, over the keys c of the split that the row sees
//   stats[t, h, split] = (m, l) = (max_c score, Σ_c exp(score − m));  partial[t, h, split, d] = Σ_c exp(score − m) · v[c, d]
// A workgroup owns one kv head and one split of a row's keys, a chunk of at most KEYS or several, and takes the GROUP query
// heads of it four at a time: what they read again is in the cache of the processor. Loads are issued several at a time
// before the first is used; with ONE_ROW and no page table or window those of the first keys and values before the record of
// the row is known, and what was asked for too early is left out.
// Grid: one workgroup per (row, kv head, split), folded; with a smaller one, of whole rows, each takes every so many-th row.
// Needs QUADS ≤ WG, WG % 16 == 0, subgroups of four lanes or more, of consecutive lanes. attention_merge joins the splits.

const WG: u32 = 256u;
const KEYS: u32 = 128u;
const GROUP: u32 = 4u;   // query heads per kv head
const QUADS: u32 = 16u;  // D / 4
const KEYS_AT_ONCE: u32 = WG / QUADS;
const WIDE: u32 = (QUADS + 15u) / 16u * 16u;

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;              // [tokens, kv_heads · GROUP, QUADS]
@group(0) @binding(1) var<storage, read> k_cache: array<cache_quad>;       // [pool rows, kv_heads, QUADS]
@group(0) @binding(2) var<storage, read> v_cache: array<cache_quad>;       // [pool rows, kv_heads, QUADS]
@group(0) @binding(3) var<storage, read> batch: array<vec4<u32>>;          // [1 + tokens]
@group(0) @binding(4) var<storage, read_write> partial: array<vec4<f32>>;  // [rows, kv_heads · GROUP, splits, QUADS]
@group(0) @binding(5) var<storage, read_write> stats: array<vec2<f32>>;    // [rows, kv_heads · GROUP, splits]
@group(0) @binding(6) var<uniform> params: Params;

var<workgroup> quads: array<vec4<f32>, 4u * WG>;      // queries of four heads, zeros past the end of each; then sums of values
var<workgroup> scores: array<f32, 4u * KEYS>;         // of each key, for four heads; lanes write them one by one
var<workgroup> weights: array<vec4<f32>, KEYS>;       // their powers
var<workgroup> tops: array<f32, WG>;                  // of each subgroup: the largest score of four heads
var<workgroup> totals: array<vec4<f32>, WG / 4u>;     // and the sum of powers

// Scores of one key quad against four heads.
fn head_dots(d: u32, k4: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(
        dot(quads[d], k4), dot(quads[d + WIDE], k4), dot(quads[d + 2u * WIDE], k4), dot(quads[d + 3u * WIDE], k4),
    );
}

fn key_dots(keys: Raw, d: u32) -> vec4<f32> {
    return head_dots(d, cache_load(keys.a)) + head_dots(d + 4u, cache_load(keys.b))
        + head_dots(d + 8u, cache_load(keys.c)) + head_dots(d + 12u, cache_load(keys.d));
}

// Of four heads the sum over four lanes: of head 2a + b for the lane whose number ends in bits b a.
fn own_head(heads: vec4<f32>, lane: u32) -> f32 {
    let odd = lane % 2u == 1u;
    let kept = select(heads.xy, heads.zw, odd);
    let sent = select(heads.zw, heads.xy, odd);
    let pair = kept + vec2<f32>(subgroupShuffleXor(sent.x, 1u), subgroupShuffleXor(sent.y, 1u));
    let high = lane / 2u % 2u == 1u;
    return select(pair.x, pair.y, high) + subgroupShuffleXor(select(pair.y, pair.x, high), 2u);
}

// Four rows of values, KEYS_AT_ONCE apart, from `row` of the pool on; past `end` that one.
fn load_values(column: u32, row: u32, end: u32) -> Raw {
    let rows = vec4<u32>(row, row + KEYS_AT_ONCE, row + 2u * KEYS_AT_ONCE, row + 3u * KEYS_AT_ONCE);
    return value_quads(column, min(rows, vec4<u32>(end)));
}

var<private> sum0: vec4<f32>;  // of values, for each of four heads
var<private> sum1: vec4<f32>;
var<private> sum2: vec4<f32>;
var<private> sum3: vec4<f32>;

fn add_row(quad: cache_quad, c: u32, last: u32) {
    let v = select(vec4<f32>(), cache_load(quad), c <= last && within(c));
    let w = weights[min(c, last)];
    sum0 = sum0 + w.x * v;
    sum1 = sum1 + w.y * v;
    sum2 = sum2 + w.z * v;
    sum3 = sum3 + w.w * v;
}

fn add_values(values: Raw, c: u32, last: u32) {
    add_row(values.a, c, last);
    add_row(values.b, c + KEYS_AT_ONCE, last);
    add_row(values.c, c + 2u * KEYS_AT_ONCE, last);
    add_row(values.d, c + 3u * KEYS_AT_ONCE, last);
}

fn attend_split(t: u32, kv_head: u32, split: u32, lane: u32) {
    let row = batch_row(t);
    let part = lane % 4u;
    let slot = part % 2u * 2u + part / 2u;  // which of four heads `own_head` gives to this lane
    let value_row = lane / QUADS;
    let column = kv_head * QUADS + lane % QUADS;
    let size = subgroupAdd(1u);  // lanes of a subgroup
    // QUADS lanes read a row of values side by side, KEYS_AT_ONCE rows at a time; four lanes share a key.
    var early: Raw;
    var early_key: Raw;
    if (ONE_ROW && !PAGED && WINDOW == 0u) {
        if (split * KEYS >= pool_rows()) {
            return;
        }
        let end = pool_rows() - 1u;
        early = load_values(column, split * KEYS + value_row, end);
        early_key = load_key(min(split * KEYS + lane / 4u, end), kv_head, part);
    }
    let begin = first_chunk(last_key(row));
    let length = last_key(row) + 1u - begin;
    let chunk = chunk_keys(length);
    let first = split * chunks_per_split(length) * chunk;
    if (first >= length) {
        return;
    }
    let end_of_split = min(first + chunks_per_split(length) * chunk, length);
    if (!ONE_ROW || PAGED || WINDOW > 0u || first != split * KEYS) {
        let start = pool_row(row.pages, begin + first);
        let end = start + min(chunk, length - first) - 1u;
        early = load_values(column, start + value_row, end);
        early_key = load_key(min(start + lane / 4u, end), kv_head, part);
    }

    for (var i = 0u; i < GROUP; i = i + 4u) {
        for (var j = lane; j < 4u * WIDE; j = j + WG) {
            let head = i + j / WIDE;
            let at = ((t * params.kv_heads + kv_head) * GROUP + min(head, GROUP - 1u)) * QUADS + min(j % WIDE, QUADS - 1u);
            quads[j] = select(vec4<f32>(), q[at] * params.scale, head < GROUP && j % WIDE < QUADS);
        }
        sum0 = vec4<f32>();
        sum1 = vec4<f32>();
        sum2 = vec4<f32>();
        sum3 = vec4<f32>();
        var largest = vec4<f32>(-3.4e38);
        var total = vec4<f32>();
        for (var at = first; at < end_of_split; at = at + chunk) {
            let count = min(chunk, length - at);
            let last = count - 1u;
            hidden = hidden_keys(last_key(row), begin + at);
            var start = begin + at;
            var values = early;
            var key = early_key;
            if (PAGED || at != first) {
                start = pool_row(row.pages, begin + at);
            }
            if (at != first) {
                values = load_values(column, start + value_row, start + last);
                key = load_key(start + min(lane / 4u, last), kv_head, part);
            }
            var next = values;
            if (4u * KEYS_AT_ONCE < count) {
                next = load_values(column, start + value_row + 4u * KEYS_AT_ONCE, start + last);
            }
            workgroupBarrier();

            var top = -3.4e38;
            for (var j = 0u; j < KEYS; j = j + WG / 4u) {  // as many as there can be: a compiler unrolls it
                let c = j + lane / 4u;
                if (j > 0u) {
                    key = load_key(start + min(c, last), kv_head, part);
                }
                var dots = key_dots(key, part);
                for (var d = part + 16u; d < WIDE; d = d + 16u) {
                    dots = dots + key_dots(load_key(start + min(c, last), kv_head, d), d);
                }
                let score = capped(own_head(dots, lane));
                if (c < count && within(c)) {
                    scores[4u * c + slot] = score;
                    top = max(top, score);
                }
            }
            for (var offset = 4u; offset < size; offset = offset * 2u) {
                top = max(top, subgroupShuffleXor(top, offset));
            }
            if (lane % size < 4u) {
                tops[4u * (lane / size) + slot] = top;
            }
            workgroupBarrier();

            // Softmax over the chunk, four heads at once, by the largest score so far.
            let before = largest;
            for (var j = 0u; j < WG / size; j = j + 1u) {
                largest = max(largest, vec4<f32>(tops[4u * j], tops[4u * j + 1u], tops[4u * j + 2u], tops[4u * j + 3u]));
            }
            if (at != first) {
                let kept = exp(before - largest);
                total = total * kept;
                sum0 = sum0 * kept.x;
                sum1 = sum1 * kept.y;
                sum2 = sum2 * kept.z;
                sum3 = sum3 * kept.w;
            }
            for (var c = lane; c < count; c = c + WG) {
                let score = vec4<f32>(scores[4u * c], scores[4u * c + 1u], scores[4u * c + 2u], scores[4u * c + 3u]);
                let e = select(vec4<f32>(), exp(score - largest), within(c));
                weights[c] = e;
                total = total + e;
            }
            workgroupBarrier();  // also: all lanes are back from loops of different length
            if (at + chunk >= end_of_split) {
                total = vec4<f32>(subgroupAdd(total.x), subgroupAdd(total.y), subgroupAdd(total.z), subgroupAdd(total.w));
                if (lane % size == 0u) {
                    totals[lane / size] = total;
                }
            }
            if (value_row < KEYS_AT_ONCE) {
                add_values(values, value_row, last);
                if (4u * KEYS_AT_ONCE < count) {
                    add_values(next, value_row + 4u * KEYS_AT_ONCE, last);
                }
                for (var c = value_row + 8u * KEYS_AT_ONCE; c < count; c = c + 8u * KEYS_AT_ONCE) {
                    let more = load_values(column, start + c, start + last);
                    let rest = load_values(column, start + c + 4u * KEYS_AT_ONCE, start + last);
                    add_values(more, c, last);
                    add_values(rest, c + 4u * KEYS_AT_ONCE, last);
                }
            }
            if (!LONG_ROWS) {
                break;  // a split is one chunk
            }
        }
        quads[lane] = sum0;
        quads[WG + lane] = sum1;
        quads[2u * WG + lane] = sum2;
        quads[3u * WG + lane] = sum3;
        workgroupBarrier();
        total = totals[0];
        for (var j = 1u; j < WG / size; j = j + 1u) {
            total = total + totals[j];
        }
        let base = ((t - params.first) * params.kv_heads + kv_head) * GROUP;
        for (var j = lane; j < 4u * QUADS; j = j + WG) {
            let head = i + j / QUADS;
            if (head < GROUP) {
                var value = vec4<f32>();
                for (var k = 0u; k < KEYS_AT_ONCE; k = k + 1u) {
                    value = value + quads[j / QUADS * WG + k * QUADS + j % QUADS];
                }
                partial[((base + head) * params.splits + split) * QUADS + j % QUADS] = value;
            }
        }
        let head = i + lane;
        if (lane < 4u && head < GROUP) {
            stats[(base + head) * params.splits + split] = vec2<f32>(largest[lane], total[lane]);
        }
        workgroupBarrier();  // quads and totals may be written again
    }
}
