// out[0, h, d] = Σ_c exp(score_c − m) · v[c, d] / Σ_c exp(score_c − m),   score_c = scale · Σ_d q[h, d] · k[c, d], m = max score
// One query and at most KEYS keys, of which a workgroup owns one query head: a short context is read faster by every head
// for itself, and there is nothing to join. What takes the time are trips to memory, so that the first keys and values are
// asked for before it is known how many there are; what was asked for too early is left out.
// Four lanes share a key, each takes every fourth quad of it; then QUADS lanes read a row of values side by side, TEAMS rows
// at a time, and each of them takes the powers itself, which saves a barrier.
// Grid: one workgroup per query head, folded. Needs QUADS ≤ WG, subgroups of four lanes or more, of consecutive lanes.

const WG: u32 = 256u;
const KEYS: u32 = 256u;
const QUADS: u32 = 16u;  // D / 4
const TEAMS: u32 = WG / QUADS;

struct Params {
    heads: u32,
    kv_heads: u32,
    rows: u32,    // of the caches, C
    scale: f32,
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;          // [1, heads, QUADS]
@group(0) @binding(1) var<storage, read> k_cache: array<cache_quad>;   // [C, kv_heads, QUADS]
@group(0) @binding(2) var<storage, read> v_cache: array<cache_quad>;   // [C, kv_heads, QUADS]
@group(0) @binding(3) var<storage, read> positions: array<u32>;        // [1], where the query stands
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;  // [1, heads, QUADS]
@group(0) @binding(5) var<uniform> params: Params;

var<workgroup> scores: array<f32, KEYS>;
var<workgroup> tops: array<f32, WG / 4u>;         // of each subgroup: the largest score
var<workgroup> sums: array<vec4<f32>, WG>;        // of values, of each team
var<workgroup> totals: array<f32, WG / QUADS>;    // of powers, of each team

// Four quads, four apart, of a row of q or of a cache; past the end the last one, which `beyond` takes out of q.
struct Quads {
    a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>,
}

fn beyond(quad: u32, value: vec4<f32>) -> vec4<f32> {
    return select(value, vec4<f32>(), quad >= QUADS);
}

fn load_query(head: u32, d: u32) -> Quads {
    let at = head * QUADS;
    return Quads(
        beyond(d, q[at + min(d, QUADS - 1u)]), beyond(d + 4u, q[at + min(d + 4u, QUADS - 1u)]),
        beyond(d + 8u, q[at + min(d + 8u, QUADS - 1u)]), beyond(d + 12u, q[at + min(d + 12u, QUADS - 1u)]),
    );
}

struct Raw {
    a: cache_quad, b: cache_quad, c: cache_quad, d: cache_quad,
}

fn load_key(row: u32, kv_head: u32, d: u32) -> Raw {
    let at = (min(row, params.rows - 1u) * params.kv_heads + kv_head) * QUADS;
    return Raw(
        k_cache[at + min(d, QUADS - 1u)], k_cache[at + min(d + 4u, QUADS - 1u)],
        k_cache[at + min(d + 8u, QUADS - 1u)], k_cache[at + min(d + 12u, QUADS - 1u)],
    );
}

fn key_dot(query: Quads, key: Raw) -> f32 {
    return dot(query.a, cache_load(key.a)) + dot(query.b, cache_load(key.b))
        + dot(query.c, cache_load(key.c)) + dot(query.d, cache_load(key.d));
}

// Four rows of values, TEAMS apart.
fn load_values(column: u32, row: u32) -> Raw {
    let end = params.rows - 1u;
    return Raw(
        v_cache[min(row, end) * (params.kv_heads * QUADS) + column],
        v_cache[min(row + TEAMS, end) * (params.kv_heads * QUADS) + column],
        v_cache[min(row + 2u * TEAMS, end) * (params.kv_heads * QUADS) + column],
        v_cache[min(row + 3u * TEAMS, end) * (params.kv_heads * QUADS) + column],
    );
}

var<private> sum: vec4<f32>;  // of values
var<private> total: f32;      // of powers

fn add_row(quad: cache_quad, c: u32, last: u32, top: f32) {
    if (c <= last) {
        let e = exp(scores[c] - top);
        sum = sum + e * cache_load(quad);
        total = total + e;
    }
}

fn add_values(values: Raw, c: u32, last: u32, top: f32) {
    add_row(values.a, c, last, top);
    add_row(values.b, c + TEAMS, last, top);
    add_row(values.c, c + 2u * TEAMS, last, top);
    add_row(values.d, c + 3u * TEAMS, last, top);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let head = group.x + group.y * groups.x;
    if (head >= params.heads) {
        return;
    }
    let kv_head = head / (params.heads / params.kv_heads);
    let part = lane % 4u;
    let team = lane / QUADS;
    let column = kv_head * QUADS + lane % QUADS;
    let size = subgroupAdd(1u);  // lanes of a subgroup
    // Of a head of more than 64 values the second 64 are asked for at once as well, and more rows of values, because
    // fewer teams read them. (Heads of 64 took 4.6 instead of 4.3 µs with that.)
    let query = load_query(head, part);
    let early_key = load_key(lane / 4u, kv_head, part);
    var more_query = query;
    var more_key = early_key;
    if (QUADS > 16u) {
        more_query = load_query(head, 16u + part);
        more_key = load_key(lane / 4u, kv_head, 16u + part);
    }
    let early = load_values(column, team);
    let last = min(positions[0], KEYS - 1u);
    var next = early;
    if (QUADS > 16u && 4u * TEAMS <= last) {
        next = load_values(column, team + 4u * TEAMS);
    }

    var top = -3.4e38;
    for (var first = 0u; first <= last; first = first + WG / 4u) {
        let c = first + lane / 4u;
        var key = early_key;
        if (first > 0u) {
            key = load_key(c, kv_head, part);
            if (QUADS > 16u) {
                more_key = load_key(c, kv_head, 16u + part);
            }
        }
        var score = key_dot(query, key);
        if (QUADS > 16u) {
            score = score + key_dot(more_query, more_key);
        }
        for (var i = 32u; i < QUADS; i = i + 16u) {
            score = score + key_dot(load_query(head, i + part), load_key(c, kv_head, i + part));
        }
        score = score + subgroupShuffleXor(score, 1u);
        score = params.scale * (score + subgroupShuffleXor(score, 2u));
        if (c <= last) {
            scores[c] = score;
            top = max(top, score);
        }
    }
    for (var offset = 4u; offset < size; offset = offset * 2u) {
        top = max(top, subgroupShuffleXor(top, offset));
    }
    if (lane % size == 0u) {
        tops[lane / size] = top;
    }
    workgroupBarrier();
    for (var i = 0u; i < WG / size; i = i + size) {
        top = max(top, tops[min(i + lane % size, WG / size - 1u)]);
    }
    top = subgroupMax(top);

    sum = vec4<f32>();
    total = 0.0;
    if (team < TEAMS) {
        add_values(early, team, last, top);
        if (QUADS > 16u && 4u * TEAMS <= last) {
            add_values(next, team + 4u * TEAMS, last, top);
        }
        for (var c = team + select(4u, 8u, QUADS > 16u) * TEAMS; c <= last; c = c + 4u * TEAMS) {
            add_values(load_values(column, c), c, last, top);
        }
        sums[lane] = sum;
        if (lane % QUADS == 0u) {
            totals[team] = total;
        }
    }
    workgroupBarrier();
    if (lane < QUADS) {
        for (var t = 1u; t < TEAMS; t = t + 1u) {
            sum = sum + sums[t * QUADS + lane];
            total = total + totals[t];
        }
        out[head * QUADS + lane] = sum / total;
    }
}
