// out[t, h, d] = Σ_c exp(score_c − m) · v[c, d] / Σ_c exp(score_c − m),   score_c = scale · Σ_d q[t, h, d] · k[c, d], m = max score
// over the keys c that row t sees, for the rows of runs: those up to its position, of a window the last ones. A sink is a score
// in Σ and m without a value. A workgroup owns one query head of ROWS consecutive rows of the
// batch, and goes through the keys of their sequences KEYS at a time with running maxima: keys and then values are staged in
// workgroup memory, COLUMNS quads of each at a time. A thread makes 4 × 4 scores, and then one quad of 4 rows of sums in
// each of SLICES slices of D, so that 8 loads from workgroup memory serve 64 multiplications.
// Tiles of keys begin at multiples of KEYS of a sequence: what a row computes does not depend on its neighbours. Rows of
// one sequence at consecutive positions are a segment; a tile of rows may hold several, and rows of no run in between.
// Grid: one workgroup per (ROWS rows, query head), folded. The last rows see the most keys, so they come first.
// Needs QUADS ≤ 4 · COLUMNS, KEYS a divisor of PAGE.

const ROWS: u32 = 32u;
const KEYS: u32 = 64u;
const COLUMNS: u32 = KEYS / 4u;         // threads that share four rows, four keys each
const WG: u32 = ROWS / 4u * COLUMNS;
const QUADS: u32 = 16u;                 // D / 4
const SLICES: u32 = (QUADS + COLUMNS - 1u) / COLUMNS;
const WIDE: u32 = COLUMNS + 1u;         // rows of quads with one more: they lie in different banks
const Q_WIDE: u32 = QUADS + 1u;

struct Params {
    heads: u32,
    kv_heads: u32,
    scale: f32,
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;          // [tokens, heads, QUADS]
@group(0) @binding(1) var<storage, read> k_cache: array<cache_quad>;   // [pool rows, kv_heads, QUADS]
@group(0) @binding(2) var<storage, read> v_cache: array<cache_quad>;   // [pool rows, kv_heads, QUADS]
@group(0) @binding(3) var<storage, read> batch: array<vec4<u32>>;      // [1 + tokens]
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;  // [tokens, heads, QUADS]
@group(0) @binding(5) var<uniform> params: Params;

var<workgroup> q_tile: array<vec4<f32>, ROWS * Q_WIDE>;   // scaled
var<workgroup> kv_tile: array<vec4<f32>, KEYS * WIDE>;    // keys, then values; key c lies in row c % 4 · COLUMNS + c / 4
var<workgroup> weights: array<vec4<f32>, ROWS * WIDE>;    // powers of scores, of four keys each
var<workgroup> columns: array<vec4<f32>, WG>;             // of each thread and four rows: the largest score, then sums of powers

// Four vectors for four rows.
struct Tile {
    a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>,
}

fn scaled(tile: Tile, factors: vec4<f32>) -> Tile {
    return Tile(tile.a * factors.x, tile.b * factors.y, tile.c * factors.z, tile.d * factors.w);
}

// Where quad i of a slice of D of key c lies in kv_tile: threads side by side read keys four apart, from different banks.
fn place(c: u32, i: u32) -> u32 {
    return (c % 4u * COLUMNS + c / 4u) * WIDE + i;
}

// Keys of the tile in hand that no row of the segment sees, since they are before the first window.
var<private> hidden: u32;

fn within(c: u32) -> bool {
    return WINDOW == 0u || c >= hidden;
}

// One slice of D of `count` keys that lie in the pool from row `start` on; zeros where none is seen.
fn stage_keys(slice: u32, start: u32, count: u32, kv_head: u32, lane: u32) {
    for (var j = 0u; j < KEYS * COLUMNS / WG; j = j + 1u) {
        let i = j * WG + lane;
        let c = i / COLUMNS;
        let quad = slice * COLUMNS + i % COLUMNS;
        let at = ((start + min(c, count - 1u)) * params.kv_heads + kv_head) * QUADS + min(quad, QUADS - 1u);
        kv_tile[place(c, i % COLUMNS)] = select(vec4<f32>(), cache_load(k_cache[at]), c < count && quad < QUADS && within(c));
    }
}

fn stage_values(slice: u32, start: u32, count: u32, kv_head: u32, lane: u32) {
    for (var j = 0u; j < KEYS * COLUMNS / WG; j = j + 1u) {
        let i = j * WG + lane;
        let c = i / COLUMNS;
        let quad = slice * COLUMNS + i % COLUMNS;
        let at = ((start + min(c, count - 1u)) * params.kv_heads + kv_head) * QUADS + min(quad, QUADS - 1u);
        kv_tile[place(c, i % COLUMNS)] = select(vec4<f32>(), cache_load(v_cache[at]), c < count && quad < QUADS && within(c));
    }
}

// Scores of four rows with four keys: the part of one slice of D.
fn add_scores(slice: u32, sums: Tile, lane: u32) -> Tile {
    var tile = sums;
    let rows = lane / COLUMNS * 4u * Q_WIDE + slice * COLUMNS;
    let keys = lane % COLUMNS * WIDE;
    for (var i = 0u; i < min(COLUMNS, QUADS - slice * COLUMNS); i = i + 1u) {
        let k0 = kv_tile[keys + i];
        let k1 = kv_tile[keys + COLUMNS * WIDE + i];
        let k2 = kv_tile[keys + 2u * COLUMNS * WIDE + i];
        let k3 = kv_tile[keys + 3u * COLUMNS * WIDE + i];
        let q0 = q_tile[rows + i];
        let q1 = q_tile[rows + Q_WIDE + i];
        let q2 = q_tile[rows + 2u * Q_WIDE + i];
        let q3 = q_tile[rows + 3u * Q_WIDE + i];
        tile.a = tile.a + vec4<f32>(dot(q0, k0), dot(q0, k1), dot(q0, k2), dot(q0, k3));
        tile.b = tile.b + vec4<f32>(dot(q1, k0), dot(q1, k1), dot(q1, k2), dot(q1, k3));
        tile.c = tile.c + vec4<f32>(dot(q2, k0), dot(q2, k1), dot(q2, k2), dot(q2, k3));
        tile.d = tile.d + vec4<f32>(dot(q3, k0), dot(q3, k1), dot(q3, k2), dot(q3, k3));
    }
    return tile;
}

// Sums of values of four rows: the quad of this thread in the slice that is staged.
fn add_values(sums: Tile, lane: u32) -> Tile {
    var tile = sums;
    let rows = lane / COLUMNS * 4u * WIDE;
    let column = lane % COLUMNS;
    for (var i = 0u; i < COLUMNS; i = i + 1u) {
        let v0 = kv_tile[i * WIDE + column];
        let v1 = kv_tile[(COLUMNS + i) * WIDE + column];
        let v2 = kv_tile[(2u * COLUMNS + i) * WIDE + column];
        let v3 = kv_tile[(3u * COLUMNS + i) * WIDE + column];
        let w0 = weights[rows + i];
        let w1 = weights[rows + WIDE + i];
        let w2 = weights[rows + 2u * WIDE + i];
        let w3 = weights[rows + 3u * WIDE + i];
        tile.a = tile.a + w0.x * v0 + w0.y * v1 + w0.z * v2 + w0.w * v3;
        tile.b = tile.b + w1.x * v0 + w1.y * v1 + w1.z * v2 + w1.w * v3;
        tile.c = tile.c + w2.x * v0 + w2.y * v1 + w2.z * v2 + w2.w * v3;
        tile.d = tile.d + w3.x * v0 + w3.y * v1 + w3.z * v2 + w3.w * v3;
    }
    return tile;
}

// Of a row at a position, up to its last key.
fn seen(scores: vec4<f32>, keys: vec4<u32>, position: u32, end: u32) -> vec4<f32> {
    if (WINDOW > 0u) {
        let within_window = keys + WINDOW > vec4<u32>(position);
        return select(vec4<f32>(-3.4e38), capped4(scores), (keys <= vec4<u32>(end)) & within_window);
    }
    return select(vec4<f32>(-3.4e38), capped4(scores), keys <= vec4<u32>(end));
}

fn largest_of(scores: vec4<f32>) -> f32 {
    return max(max(scores.x, scores.y), max(scores.z, scores.w));
}

fn store_row(t: u32, segment: vec2<u32>, head: u32, quad: u32, value: vec4<f32>) {
    if (t >= segment.x && t < segment.y) {
        out[(t * params.heads + head) * QUADS + quad] = value;
    }
}

fn store(slice: u32, sums: Tile, totals: vec4<f32>, t: u32, segment: vec2<u32>, head: u32, column: u32) {
    let quad = slice * COLUMNS + column;
    if (quad < QUADS) {
        store_row(t, segment, head, quad, sums.a / totals.x);
        store_row(t + 1u, segment, head, quad, sums.b / totals.y);
        store_row(t + 2u, segment, head, quad, sums.c / totals.z);
        store_row(t + 3u, segment, head, quad, sums.d / totals.w);
    }
}

// The rows segment.x … segment.y − 1 of the batch, of one sequence at consecutive positions; `t` is the first of the tile.
fn attend_segment(t: u32, segment: vec2<u32>, head: u32, lane: u32) {
    let row = batch_row(segment.x);
    let kv_head = head / (params.heads / params.kv_heads);
    let last = min(row_last_key(row, segment.x, segment.y - 1u), pool_rows() - 1u);
    let own = t + lane / COLUMNS * 4u;  // the first of this thread's four rows
    // Rows that are not of the segment compute what nobody stores.
    let positions = row.position + (vec4<u32>(own, own + 1u, own + 2u, own + 3u) - segment.x);
    let ends = vec4<u32>(
        row_last_key(row, segment.x, own), row_last_key(row, segment.x, own + 1u),
        row_last_key(row, segment.x, own + 2u), row_last_key(row, segment.x, own + 3u),
    );
    var tops = vec4<f32>(-3.4e38);
    var totals = vec4<f32>();
    if (SINKS) {
        tops = vec4<f32>(sink_of(head));
        totals = vec4<f32>(select(0.0, 1.0, lane % COLUMNS == 0u));  // once for each row
    }
    var sums0 = Tile();
    var sums1 = Tile();
    var sums2 = Tile();
    var sums3 = Tile();
    let least = first_key(min(row.position, last));
    for (var first = least / KEYS * KEYS; first <= last; first = first + KEYS) {
        hidden = max(least, first) - first;
        let start = pool_row(row.pages, first);
        let count = min(KEYS, last + 1u - first);
        var scores = Tile();
        workgroupBarrier();  // kv_tile may be written again
        stage_keys(0u, start, count, kv_head, lane);
        workgroupBarrier();
        scores = add_scores(0u, scores, lane);
        if (SLICES > 1u) {
            workgroupBarrier();
            stage_keys(1u, start, count, kv_head, lane);
            workgroupBarrier();
            scores = add_scores(1u, scores, lane);
        }
        if (SLICES > 2u) {
            workgroupBarrier();
            stage_keys(2u, start, count, kv_head, lane);
            workgroupBarrier();
            scores = add_scores(2u, scores, lane);
        }
        if (SLICES > 3u) {
            workgroupBarrier();
            stage_keys(3u, start, count, kv_head, lane);
            workgroupBarrier();
            scores = add_scores(3u, scores, lane);
        }
        let keys = first + lane % COLUMNS * 4u + vec4<u32>(0u, 1u, 2u, 3u);
        scores = Tile(
            seen(scores.a, keys, positions.x, ends.x), seen(scores.b, keys, positions.y, ends.y),
            seen(scores.c, keys, positions.z, ends.z), seen(scores.d, keys, positions.w, ends.w),
        );
        columns[lane] = vec4<f32>(
            largest_of(scores.a), largest_of(scores.b), largest_of(scores.c), largest_of(scores.d),
        );
        workgroupBarrier();
        let before = tops;
        for (var i = 0u; i < COLUMNS; i = i + 1u) {
            tops = max(tops, columns[lane / COLUMNS * COLUMNS + i]);
        }
        let kept = exp(before - tops);
        let powers = Tile(exp(scores.a - tops.x), exp(scores.b - tops.y), exp(scores.c - tops.z), exp(scores.d - tops.w));
        let ones = vec4<f32>(1.0);
        totals = totals * kept
            + vec4<f32>(dot(powers.a, ones), dot(powers.b, ones), dot(powers.c, ones), dot(powers.d, ones));
        let at = lane / COLUMNS * 4u * WIDE + lane % COLUMNS;
        weights[at] = powers.a;
        weights[at + WIDE] = powers.b;
        weights[at + 2u * WIDE] = powers.c;
        weights[at + 3u * WIDE] = powers.d;
        stage_values(0u, start, count, kv_head, lane);
        workgroupBarrier();
        sums0 = add_values(scaled(sums0, kept), lane);
        if (SLICES > 1u) {
            workgroupBarrier();
            stage_values(1u, start, count, kv_head, lane);
            workgroupBarrier();
            sums1 = add_values(scaled(sums1, kept), lane);
        }
        if (SLICES > 2u) {
            workgroupBarrier();
            stage_values(2u, start, count, kv_head, lane);
            workgroupBarrier();
            sums2 = add_values(scaled(sums2, kept), lane);
        }
        if (SLICES > 3u) {
            workgroupBarrier();
            stage_values(3u, start, count, kv_head, lane);
            workgroupBarrier();
            sums3 = add_values(scaled(sums3, kept), lane);
        }
    }
    columns[lane] = totals;
    workgroupBarrier();
    totals = vec4<f32>();
    for (var i = 0u; i < COLUMNS; i = i + 1u) {
        totals = totals + columns[lane / COLUMNS * COLUMNS + i];
    }
    store(0u, sums0, totals, own, segment, head, lane % COLUMNS);
    if (SLICES > 1u) {
        store(1u, sums1, totals, own, segment, head, lane % COLUMNS);
    }
    if (SLICES > 2u) {
        store(2u, sums2, totals, own, segment, head, lane % COLUMNS);
    }
    if (SLICES > 3u) {
        store(3u, sums3, totals, own, segment, head, lane % COLUMNS);
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let head = index % params.heads;
    let tiles = (batch_rows() + ROWS - 1u) / ROWS;
    if (index / params.heads >= tiles) {
        return;
    }
    let t = (tiles - 1u - index / params.heads) * ROWS;
    let end = min(t + ROWS, batch_rows());
    var first = next_row(t, 1u, end);
    if (first < end) {
        for (var i = lane; i < ROWS * QUADS; i = i + WG) {
            let at = (min(t + i / QUADS, end - 1u) * params.heads + head) * QUADS + i % QUADS;
            q_tile[i / QUADS * Q_WIDE + i % QUADS] = q[at] * params.scale;
        }
    }
    while (first < end) {
        let next = end_of_segment(first, end);
        attend_segment(t, vec2<u32>(first, next), head, lane);
        first = next_row(next, 1u, end);
    }
}
