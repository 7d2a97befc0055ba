// One query: for each chunk of keys, per query head h
//   stats[h, split] = (m, l) = (max_c score, Σ_c exp(score − m));  partial[h, split, d] = Σ_c exp(score − m) · v[c, d]
// A workgroup owns one kv head and one chunk of KEYS keys, and takes the GROUP query heads of it four at a time: what they
// read again is in the cache of the processor. Loads are issued several at a time before the first is used, those of the
// first keys and values before it is known how many there are: one after the other they would each wait a full trip to
// memory. What was asked for too early is left out.
// Grid: one workgroup per (kv head, split), folded. Needs QUADS ≤ WG, subgroups of four lanes or more, of consecutive
// lanes. attention_decode_merge joins the splits.

const WG: u32 = 256u;
const KEYS: u32 = 256u;
const GROUP: u32 = 4u;   // query heads per kv head
const H4: u32 = 1u;      // ceil(GROUP / 4)
const QUADS: u32 = 16u;  // D / 4
const TEAMS: u32 = WG / QUADS;
const STEP: u32 = 128u;  // keys that are asked for at once; KEYS is a multiple of it
const WIDE: u32 = (QUADS + 15u) / 16u * 16u;

struct Params {
    splits: u32,  // that there is room for in partial and stats
    kv_heads: u32,
    rows: u32,    // of the caches, C
    scale: f32,
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;              // [1, kv_heads · GROUP, QUADS]
@group(0) @binding(1) var<storage, read> k_cache: array<cache_quad>;       // [C, kv_heads, QUADS]
@group(0) @binding(2) var<storage, read> v_cache: array<cache_quad>;       // [C, kv_heads, QUADS]
@group(0) @binding(3) var<storage, read> positions: array<u32>;            // [1], where the query stands
@group(0) @binding(4) var<storage, read_write> partial: array<vec4<f32>>;  // [kv_heads · GROUP, splits, QUADS]
@group(0) @binding(5) var<storage, read_write> stats: array<vec2<f32>>;    // [kv_heads · GROUP, splits]
@group(0) @binding(6) var<uniform> params: Params;

var<workgroup> q_tile: array<vec4<f32>, 4u * WIDE>;   // of four heads, zeros past the end of each
var<workgroup> scores: array<f32, 4u * KEYS>;         // of each key, for four heads; lanes write them one by one
var<workgroup> weights: array<vec4<f32>, KEYS>;       // their powers
var<workgroup> tops: array<f32, WG>;                  // of each subgroup: the largest score of four heads
var<workgroup> totals: array<vec4<f32>, WG / 4u>;     // and the sum of powers
var<workgroup> pieces: array<vec4<f32>, 4u * WG>;     // of values

// Scores of one key quad against four heads.
fn head_dots(d: u32, k4: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(
        dot(q_tile[d], k4), dot(q_tile[d + WIDE], k4), dot(q_tile[d + 2u * WIDE], k4), dot(q_tile[d + 3u * WIDE], k4),
    );
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

// Four rows of values, TEAMS apart, as they lie.
struct Values {
    a: cache_quad, b: cache_quad, c: cache_quad, d: cache_quad,
}

// Rows from `row` of a cache on, or the last of it.
fn load_values(column: u32, row: u32) -> Values {
    let end = params.rows - 1u;
    return Values(
        v_cache[min(row, end) * (params.kv_heads * QUADS) + column],
        v_cache[min(row + TEAMS, end) * (params.kv_heads * QUADS) + column],
        v_cache[min(row + 2u * TEAMS, end) * (params.kv_heads * QUADS) + column],
        v_cache[min(row + 3u * TEAMS, end) * (params.kv_heads * QUADS) + column],
    );
}

// Four quads of a key, four apart, and the scores of four heads with them.
struct Keys {
    a: cache_quad, b: cache_quad, c: cache_quad, d: cache_quad,
}

fn load_keys(row: u32, kv_head: u32, d: u32) -> Keys {
    let at = (min(row, params.rows - 1u) * params.kv_heads + kv_head) * QUADS;
    return Keys(
        k_cache[at + min(d, QUADS - 1u)], k_cache[at + min(d + 4u, QUADS - 1u)],
        k_cache[at + min(d + 8u, QUADS - 1u)], k_cache[at + min(d + 12u, QUADS - 1u)],
    );
}

fn key_dots(keys: Keys, d: u32) -> vec4<f32> {
    return head_dots(d, cache_load(keys.a)) + head_dots(d + 4u, cache_load(keys.b))
        + head_dots(d + 8u, cache_load(keys.c)) + head_dots(d + 12u, cache_load(keys.d));
}

var<private> sum0: vec4<f32>;  // of values, for each of four heads
var<private> sum1: vec4<f32>;
var<private> sum2: vec4<f32>;
var<private> sum3: vec4<f32>;

fn add_row(quad: cache_quad, c: u32, last: u32) {
    let v = select(vec4<f32>(), cache_load(quad), c <= last);
    let w = weights[min(c, last)];
    sum0 = sum0 + w.x * v;
    sum1 = sum1 + w.y * v;
    sum2 = sum2 + w.z * v;
    sum3 = sum3 + w.w * v;
}

fn add_values(values: Values, c: u32, last: u32) {
    add_row(values.a, c, last);
    add_row(values.b, c + TEAMS, last);
    add_row(values.c, c + 2u * TEAMS, last);
    add_row(values.d, c + 3u * TEAMS, last);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let kv_head = min(index / params.splits, params.kv_heads - 1u);
    let split = index % params.splits;
    let first = split * KEYS;
    let part = lane % 4u;
    let slot = part % 2u * 2u + part / 2u;  // which of four heads `own_head` gives to this lane
    let team = lane / QUADS;
    let column = kv_head * QUADS + lane % QUADS;
    let size = subgroupAdd(1u);  // lanes of a subgroup
    // QUADS lanes read a row of values side by side, TEAMS rows at a time.
    let early = load_values(column, first + team);
    let early_keys = load_keys(first + lane / 4u, kv_head, part);
    let context = positions[0] + 1u;
    if (index >= params.kv_heads * params.splits || first >= context) {
        return;
    }
    let count = min(KEYS, context - first);
    let last = count - 1u;

    for (var i = 0u; i < H4; i = i + 1u) {
        for (var j = lane; j < 4u * WIDE; j = j + WG) {
            let head = 4u * i + j / WIDE;
            let at = (kv_head * GROUP + min(head, GROUP - 1u)) * QUADS + min(j % WIDE, QUADS - 1u);
            q_tile[j] = select(vec4<f32>(), q[at] * params.scale, head < GROUP && j % WIDE < QUADS);
        }
        var next = early;
        if (4u * TEAMS < count) {
            next = load_values(column, first + team + 4u * TEAMS);
        }
        workgroupBarrier();

        // Scores: four lanes share a key, each takes every fourth quad of it.
        var top = -3.4e38;
        for (var chunk = 0u; chunk < count; chunk = chunk + STEP) {
            for (var j = 0u; j < STEP; j = j + WG / 4u) {
                let key = chunk + j + lane / 4u;
                var keys = early_keys;
                if (chunk + j > 0u) {
                    keys = load_keys(first + key, kv_head, part);
                }
                var sums = key_dots(keys, part);
                for (var d = part + 16u; d < WIDE; d = d + 16u) {
                    sums = sums + key_dots(load_keys(first + key, kv_head, d), d);
                }
                let score = own_head(sums, lane);
                if (key < count) {
                    scores[4u * key + slot] = score;
                    top = max(top, score);
                }
            }
        }
        for (var offset = 4u; offset < size; offset = offset * 2u) {
            top = max(top, subgroupShuffleXor(top, offset));
        }
        if (lane % size < 4u) {
            tops[4u * (lane / size) + slot] = top;
        }
        workgroupBarrier();

        // Softmax over the chunk, four heads at once.
        var largest = vec4<f32>(-3.4e38);
        for (var j = 0u; j < WG / size; j = j + 1u) {
            largest = max(largest, vec4<f32>(tops[4u * j], tops[4u * j + 1u], tops[4u * j + 2u], tops[4u * j + 3u]));
        }
        var total = vec4<f32>();
        for (var key = lane; key < count; key = key + WG) {
            let score = vec4<f32>(scores[4u * key], scores[4u * key + 1u], scores[4u * key + 2u], scores[4u * key + 3u]);
            let e = exp(score - largest);
            weights[key] = e;
            total = total + e;
        }
        workgroupBarrier();  // also: all lanes are back from loops of different length
        total = vec4<f32>(subgroupAdd(total.x), subgroupAdd(total.y), subgroupAdd(total.z), subgroupAdd(total.w));
        if (lane % size == 0u) {
            totals[lane / size] = total;
        }

        sum0 = vec4<f32>();
        sum1 = vec4<f32>();
        sum2 = vec4<f32>();
        sum3 = vec4<f32>();
        if (team < TEAMS) {
            add_values(early, team, last);
            if (4u * TEAMS < count) {
                add_values(next, team + 4u * TEAMS, last);
            }
            for (var c = team + 8u * TEAMS; c < count; c = c + 8u * TEAMS) {
                let more = load_values(column, first + c);
                let rest = load_values(column, first + c + 4u * TEAMS);
                add_values(more, c, last);
                add_values(rest, c + 4u * TEAMS, last);
            }
        }
        pieces[lane] = sum0;
        pieces[WG + lane] = sum1;
        pieces[2u * WG + lane] = sum2;
        pieces[3u * WG + lane] = sum3;
        workgroupBarrier();
        total = totals[0];
        for (var j = 1u; j < WG / size; j = j + 1u) {
            total = total + totals[j];
        }
        for (var j = lane; j < 4u * QUADS; j = j + WG) {
            let head = 4u * i + j / QUADS;
            if (head < GROUP) {
                var value = vec4<f32>();
                for (var t = 0u; t < TEAMS; t = t + 1u) {
                    value = value + pieces[j / QUADS * WG + t * QUADS + j % QUADS];
                }
                partial[((kv_head * GROUP + head) * params.splits + split) * QUADS + j % QUADS] = value;
            }
        }
        let head = 4u * i + lane;
        if (lane < 4u && head < GROUP) {
            stats[(kv_head * GROUP + head) * params.splits + split] = vec2<f32>(largest[lane], total[lane]);
        }
        workgroupBarrier();
    }
}
