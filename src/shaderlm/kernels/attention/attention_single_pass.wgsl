// out[t, h, d] = Σ_c exp(score_c − m) · v[c, d] / Σ_c exp(score_c − m),   score_c = scale · Σ_d q[t, h, d] · k[c, d], m = max score
// over the keys c that row t sees: those up to its position, of a window the last ones. A sink is a score in Σ and m without
// a value. A workgroup owns one query head of a row, and takes KEYS keys at a time
// with a running maximum: a short context is read faster by every head for itself, and there is nothing to join. What takes
// the time are trips to memory, so that the keys and values that come first are asked for at once; without a page table
// before the record of the row is known, and what was asked for too early is left out. Queries are included: given, or made
// here with the row's own key and value.
// LANES_PER_KEY lanes share a key, four of them 16 quads of it, each every fourth; then COLUMNS lanes read a row of values
// side by side, KEYS_AT_ONCE rows at a time, and each of them takes the powers itself, which saves a barrier.
// Grid: PARTS workgroups per (row, query head), folded; with a smaller one, of whole rows, each takes every so many-th row.
// Needs QUADS ≤ WG, subgroups of LANES_PER_KEY lanes or more, of consecutive lanes; with no page table a pool of KEYS rows
// or more.

const WG: u32 = 256u;
const QUADS: u32 = 16u;  // D / 4
const PARTS: u32 = 1u;   // workgroups that share the values of a head; each computes all scores
const COLUMNS: u32 = QUADS / PARTS;
const KEYS_AT_ONCE: u32 = WG / COLUMNS;
const KEYS: u32 = 512u;                // four pages
const LANES_PER_KEY: u32 = 4u;         // 4, 8 or 16 lanes of a key
const SPAN: u32 = 4u * LANES_PER_KEY;  // quads of a key that they read at a time
const MOST: u32 = 0xFFFFFFFFu;         // keys that a row may see. Code that no row needs takes time as well: 0.8 of 7.8 µs on an H200
const JOIN: u32 = 1u;                  // rows of values of a subgroup whose lanes share the last sums; a power of two that divides KEYS_AT_ONCE

struct Params {
    heads: u32,
    kv_heads: u32,
    max_keys: u32,  // rows that see more are left alone
    skipped: u32,   // so are rows with a bit of this in their `pages`
    scale: f32,
    rotary: u32,    // quads of a head that are rotated
    q_first: u32,   // quads before the first query, where these are columns of a wider row
    k_first: u32,
    v_first: u32,
    eps: f32,       // of the norm of heads
}

@group(0) @binding(0) var<storage, read> batch: array<vec4<u32>>;      // [1 + tokens]
@group(0) @binding(1) var<storage, read_write> out: array<vec4<f32>>;  // [tokens, heads, QUADS]
@group(0) @binding(2) var<uniform> params: Params;

var<workgroup> scores: array<f32, KEYS>;
var<workgroup> tops: array<f32, WG / LANES_PER_KEY>;  // of each subgroup: the largest score
var<workgroup> sums: array<vec4<f32>, WG>;        // of values, of each lane
var<workgroup> totals: array<f32, WG / COLUMNS>;  // of powers, of each COLUMNS lanes

// Four quads, four apart, of a row of q; past the end zeros.
struct Query {
    a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>,
}

fn beyond(quad: u32, value: vec4<f32>) -> vec4<f32> {
    return select(value, vec4<f32>(), quad >= QUADS);
}

fn load_query(at: u32, d: u32) -> Query {
    return Query(
        beyond(d, query_quad(at, min(d, QUADS - 1u))), beyond(d + 4u, query_quad(at, min(d + 4u, QUADS - 1u))),
        beyond(d + 8u, query_quad(at, min(d + 8u, QUADS - 1u))), beyond(d + 12u, query_quad(at, min(d + 12u, QUADS - 1u))),
    );
}

// Four quads of a key, as load_key, of the row's own key where it is that.
fn with_fresh(loaded: Raw, row: u32, d: u32) -> Raw {
    if (!FRESH || !is_fresh(row)) {
        return loaded;
    }
    return Raw(
        fresh_key(min(d, QUADS - 1u)), fresh_key(min(d + 4u, QUADS - 1u)),
        fresh_key(min(d + 8u, QUADS - 1u)), fresh_key(min(d + 12u, QUADS - 1u)),
    );
}

fn key_dot(query: Query, key: Raw) -> f32 {
    return dot(query.a, cache_load(key.a)) + dot(query.b, cache_load(key.b))
        + dot(query.c, cache_load(key.c)) + dot(query.d, cache_load(key.d));
}

// The tile in hand: its first key, and where in the pool its four pages begin.
var<private> tile: u32;
var<private> starts: vec4<u32>;

fn begin_tile(first: u32, pages: u32, last: u32) {
    tile = first;
    if (PAGED) {
        let page = min(vec4<u32>(0u, 1u, 2u, 3u) + first / PAGE, vec4<u32>(last / PAGE)) * PAGE;
        starts = vec4<u32>(
            pool_row(pages, page.x), pool_row(pages, page.y), pool_row(pages, page.z), pool_row(pages, page.w),
        );
    }
}

// How far into a page a tile begins: a window may begin anywhere. Such a tile ends with its fourth page.
fn into_page(first: u32) -> u32 {
    return select(0u, first % PAGE, PAGED && WINDOW > 0u);
}

// The last key of the tile that begins with key `first`.
fn end_of_tile(first: u32, last: u32) -> u32 {
    return min(last - first, KEYS - 1u - into_page(first));
}

// The row of the pool that holds key c of the tile.
fn tile_row(c: u32) -> u32 {
    if (!PAGED) {
        return tile + c;
    }
    let at = c + into_page(tile);
    let page = at / PAGE;
    return select(select(starts.x, starts.y, page == 1u), select(starts.z, starts.w, page == 3u), page > 1u) + at % PAGE;
}

// Keys and values of the tile that are asked for first. Of a longer head than LANES_PER_KEY lanes read at a time, what
// follows is asked for at once as well. (Heads of 64 took 4.6 instead of 4.3 µs with that.)
struct Early {
    key: Raw,
    more_key: Raw,
    values: Raw,
}

// Which of the workgroups that share the values of a head this is.
var<private> part_of_values: u32;

// The quad of values that a lane reads.
fn own_column(lane: u32) -> u32 {
    return part_of_values * COLUMNS + lane % COLUMNS;
}

// The first quad of a key that a lane reads.
fn own_quad(lane: u32) -> u32 {
    return lane % LANES_PER_KEY / 4u * 16u + lane % 4u;
}

fn load_early(kv_head: u32, lane: u32, end: u32) -> Early {
    let row = tile_row(min(lane / LANES_PER_KEY, end));
    let key = load_key(row, kv_head, own_quad(lane));
    var more_key = key;
    if (QUADS > SPAN) {
        more_key = load_key(row, kv_head, SPAN + own_quad(lane));
    }
    return Early(key, more_key, load_values(kv_head, lane, lane / COLUMNS, end));
}

// Four rows of values, KEYS_AT_ONCE apart, from key c of the tile on; past `end` that one.
fn load_values(kv_head: u32, lane: u32, c: u32, end: u32) -> Raw {
    return value_quads(
        kv_head * QUADS + own_column(lane),
        vec4<u32>(
            tile_row(min(c, end)), tile_row(min(c + KEYS_AT_ONCE, end)),
            tile_row(min(c + 2u * KEYS_AT_ONCE, end)), tile_row(min(c + 3u * KEYS_AT_ONCE, end)),
        ),
    );
}

var<private> top: f32;        // largest score so far
var<private> sum: vec4<f32>;  // of values
var<private> total: f32;      // of powers

fn add_row(quad: cache_quad, lane: u32, c: u32, end: u32) {
    if (c <= end) {
        let e = exp(scores[c] - top);
        var value = quad;
        if (FRESH && is_fresh(tile_row(c))) {
            value = fresh_value(own_column(lane));
        }
        sum = sum + e * cache_load(value);
        total = total + e;
    }
}

fn add_values(values: Raw, lane: u32, c: u32, end: u32) {
    add_row(values.a, lane, c, end);
    add_row(values.b, lane, c + KEYS_AT_ONCE, end);
    add_row(values.c, lane, c + 2u * KEYS_AT_ONCE, end);
    add_row(values.d, lane, c + 3u * KEYS_AT_ONCE, end);
}

// The largest score of the tile, of which a lane knows that of its own keys. `size`: lanes of a subgroup.
fn workgroup_top(own: f32, lane: u32, size: u32) -> f32 {
    var largest = own;
    for (var offset = LANES_PER_KEY; offset < size; offset = offset * 2u) {
        largest = max(largest, subgroupShuffleXor(largest, offset));
    }
    if (lane % size == 0u) {
        tops[lane / size] = largest;
    }
    workgroupBarrier();
    for (var i = 0u; i < WG / size; i = i + size) {
        largest = max(largest, tops[min(i + lane % size, WG / size - 1u)]);
    }
    return subgroupMax(largest);
}

// Adds the keys 0 … end of the tile. `again`: there were tiles before, or a sink.
fn attend_tile(at: u32, kv_head: u32, lane: u32, query: Query, more_query: Query, early: Early, end: u32, again: bool) {
    let part = own_quad(lane);
    let value_row = lane / COLUMNS;
    let size = subgroup_lanes();  // lanes of a subgroup
    var next = early.values;  // fewer rows of longer heads are read at once
    if (QUADS > 16u && 4u * KEYS_AT_ONCE < MOST && 4u * KEYS_AT_ONCE <= end) {
        next = load_values(kv_head, lane, value_row + 4u * KEYS_AT_ONCE, end);
    }
    var own_top = -3.4e38;
    for (var first = 0u; first <= end; first = first + WG / LANES_PER_KEY) {
        let c = first + lane / LANES_PER_KEY;
        let row = tile_row(min(c, end));
        var key = early.key;
        var more_key = early.more_key;
        if (first > 0u) {
            key = load_key(row, kv_head, part);
            if (QUADS > SPAN) {
                more_key = load_key(row, kv_head, SPAN + part);
            }
        }
        var score = key_dot(query, with_fresh(key, row, part));
        if (QUADS > SPAN) {
            score = score + key_dot(more_query, with_fresh(more_key, row, SPAN + part));
        }
        for (var i = 2u * SPAN; i < QUADS; i = i + SPAN) {
            key = with_fresh(load_key(row, kv_head, i + part), row, i + part);
            score = score + key_dot(load_query(at, i + part), key);
        }
        for (var offset = 1u; offset < LANES_PER_KEY; offset = offset * 2u) {
            score = score + subgroupShuffleXor(score, offset);
        }
        score = capped(params.scale * score);
        if (c <= end) {
            scores[c] = score;
            own_top = max(own_top, score);
        }
    }
    let before = top;
    top = workgroup_top(own_top, lane, size);
    if (again) {
        top = max(top, before);
        let kept = exp(before - top);
        sum = sum * kept;
        total = total * kept;
    }
    if (value_row < KEYS_AT_ONCE) {
        add_values(early.values, lane, value_row, end);
        if (QUADS > 16u && 4u * KEYS_AT_ONCE < MOST && 4u * KEYS_AT_ONCE <= end) {
            add_values(next, lane, value_row + 4u * KEYS_AT_ONCE, end);
        }
        let early_rows = select(4u, 8u, QUADS > 16u) * KEYS_AT_ONCE;
        if (early_rows < MOST) {
            for (var c = value_row + early_rows; c <= end; c = c + 4u * KEYS_AT_ONCE) {
                add_values(load_values(kv_head, lane, c, end), lane, c, end);
            }
        }
    }
}

fn left_alone(row: Row) -> bool {
    return (row.position >= params.max_keys) | ((row.pages & params.skipped) != 0u);
}

fn attend_row(t: u32, head: u32, lane: u32) {
    let row = batch_row(t);
    let kv_head = head / (params.heads / params.kv_heads);
    let at = (t * params.heads + head) * QUADS;
    var early: Early;
    if (!PAGED) {  // nothing that is asked for here waits for the record
        begin_tile(0u, 0u, 0u);
        early = load_early(kv_head, lane, KEYS - 1u);
    }
    begin_queries(head, kv_head, lane, row, part_of_values == 0u);
    let query = load_query(at, own_quad(lane));
    var more_query = query;
    if (QUADS > SPAN) {
        more_query = load_query(at, SPAN + own_quad(lane));
    }
    top = -3.4e38;
    sum = vec4<f32>();
    total = 0.0;
    if (SINKS) {
        top = sink_of(head);
        total = select(0.0, 1.0, lane < COLUMNS);  // once: of the first COLUMNS lanes
    }
    if (PAGED) {
        let last = last_key(row);
        let first = first_key(last);
        begin_tile(first, row.pages, last);
        let end = end_of_tile(first, last);
        attend_tile(at, kv_head, lane, query, more_query, load_early(kv_head, lane, end), end, SINKS);
    } else {
        let first = first_key(last_key(row));
        if (WINDOW > 0u && first > 0u) {  // the window is past its first keys: others are asked for
            begin_tile(first, 0u, 0u);
            early = load_early(kv_head, lane, end_of_tile(first, last_key(row)));
        }
        attend_tile(at, kv_head, lane, query, more_query, early, end_of_tile(first, last_key(row)), SINKS);
    }
    if (MOST > KEYS) {
        let last = last_key(row);
        let begin = first_key(last);
        for (var first = begin - into_page(begin) + KEYS; first <= last; first = first + KEYS) {
            workgroupBarrier();  // the scores have been read
            begin_tile(first, row.pages, last);
            let end = end_of_tile(first, last);
            attend_tile(at, kv_head, lane, query, more_query, load_early(kv_head, lane, end), end, true);
        }
    }
    let value_row = lane / COLUMNS;
    if (value_row < KEYS_AT_ONCE) {
        sums[lane] = sum;
        if (lane % COLUMNS == 0u) {
            totals[value_row] = total;
        }
    }
    workgroupBarrier();
    if (lane < JOIN * COLUMNS) {
        // As many rounds as are known when it is compiled: all are asked for at once. (Where KEYS_AT_ONCE of a subgroup
        // was not known, shuffles first took 0.3 µs longer on an H200.)
        for (var i = JOIN; i < KEYS_AT_ONCE; i = i + JOIN) {
            sum = sum + sums[i * COLUMNS + lane];
            total = total + totals[i + value_row];
        }
    }
    for (var offset = COLUMNS; offset < JOIN * COLUMNS; offset = offset * 2u) {
        sum = sum + vec4<f32>(
            subgroupShuffleXor(sum.x, offset), subgroupShuffleXor(sum.y, offset),
            subgroupShuffleXor(sum.z, offset), subgroupShuffleXor(sum.w, offset),
        );
        total = total + subgroupShuffleXor(total, offset);
    }
    if (lane < COLUMNS) {
        out[at + own_column(lane)] = sum / total;
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let number = group.x + group.y * groups.x;
    part_of_values = number % PARTS;
    let index = number / PARTS;
    let head = index % params.heads;
    if (ONE_ROW) {
        if (index < params.heads) {
            attend_row(0u, head, lane);
        }
        return;
    }
    let rows_at_once = groups.x * groups.y / (params.heads * PARTS);
    if (index < rows_at_once * params.heads) {
        var t = next_row(index / params.heads, rows_at_once, batch_rows());
        while (t < batch_rows()) {
            attend_row(t, head, lane);
            t = next_row(t + rows_at_once, rows_at_once, batch_rows());
        }
    }
}
