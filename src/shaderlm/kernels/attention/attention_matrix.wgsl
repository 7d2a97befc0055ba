// out[t, h, d] = Σ_c e_c · v[c, d] / Σ_c e_c,   e_c = 2^(score_c − m), score_c = scale · log2(e) · Σ_d q[t, h, d] · k[c, d]
// over the keys c that row t sees, for rows of runs; others are left alone. A sink is a score in the sum below, without a
// value. Products are made by matrix
// units: q and e are rounded to f16, sums are f32. A row of q that f16 cannot hold is divided by a power of two first.
// A workgroup takes ROWS rows with the GROUP query heads of a kv head, STACKED (row, head) pairs, and goes through the keys
// KEYS at a time. Matrices have no single values: scores go through workgroup memory, where LANES lanes share a pair. A
// maximum m that changes would take the sums the same way. So m stays until a score is more than MARGIN above it, which
// is rare after the first tile: e stays below 2^MARGIN, and what e loses below 2^−24 is nothing.
// Values and keys of the next tile are on their way meanwhile. Subgroups share out STACKED rows in ROW_GROUPS and, for the
// same rows, keys and then columns of values in COLUMN_GROUPS.
// Tiles of keys begin at multiples of KEYS of a sequence: what a row computes does not depend on its neighbours. Rows of
// one sequence at consecutive positions are a segment; a tile of rows may hold several, and rows of no run in between.
// Grid: one workgroup per (ROWS rows, kv head), folded. The last rows see the most keys, so they come first.
// Needs whole matrices: D and KEYS multiples of MATRIX_K and of MATRIX_N · COLUMN_GROUPS, and those of 8. And
// GROUP ≤ STACKED ≤ 2 · KEYS, KEYS a divisor of PAGE, subgroups of SUBGROUP consecutive lanes.

const SUBGROUP: u32 = 32u;
const MATRIX_M: u32 = 16u;
const MATRIX_N: u32 = 16u;
const MATRIX_K: u32 = 16u;
const ROW_GROUPS: u32 = 4u;
const COLUMN_GROUPS: u32 = 1u;
const ROW_TILES: u32 = 1u;              // matrices of MATRIX_M rows that a subgroup has
const KEYS: u32 = 64u;
const GROUP: u32 = 4u;                  // query heads per kv head
const D: u32 = 64u;
const WG: u32 = SUBGROUP * ROW_GROUPS * COLUMN_GROUPS;
const STACKED: u32 = ROW_GROUPS * ROW_TILES * MATRIX_M;
const ROWS: u32 = STACKED / GROUP;
const LANES: u32 = WG / STACKED;        // lanes of a row in softmax
const SHARE: u32 = KEYS / 8u / LANES;   // octets of scores of a lane
const OCTETS: u32 = D / 8u;
const LOADS: u32 = (KEYS * OCTETS + WG - 1u) / WG;
const DEPTH: u32 = D / MATRIX_K;               // matrices along a row of q
const SCORE_TILES: u32 = KEYS / MATRIX_N / COLUMN_GROUPS;
const SUM_TILES: u32 = D / MATRIX_N / COLUMN_GROUPS;
const ROUND_TILES: u32 = 4u;            // of sums that go through score_tile at once: a divisor of SUM_TILES and SCORE_TILES
const ROUND: u32 = ROUND_TILES * MATRIX_N / 4u;
const ROUNDS: u32 = SUM_TILES / ROUND_TILES;
// Rows of workgroup memory with 16 or 32 bytes more: rows lie in different banks. Matrices lie at multiples of 16 bytes, which
// is what drivers expect, so that elements of all arrays have 16.
const KV_WIDE: u32 = OCTETS + 1u;
const SCORE_WIDE: u32 = KEYS / 4u + 2u;
const POWER_WIDE: u32 = KEYS / 8u + 1u;
const MARGIN: f32 = 8.0;
const LOWEST: f32 = -3.0e38;

alias Left = subgroup_matrix_left<f16, MATRIX_K, MATRIX_M>;
alias Right = subgroup_matrix_right<f16, MATRIX_N, MATRIX_K>;
alias Result = subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>;

struct Params {
    kv_heads: u32,
    scale: f32,  // times log2(e)
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;          // [tokens, kv_heads · GROUP, D / 4]
@group(0) @binding(1) var<storage, read> k_cache: array<vec4<u32>>;    // [pool rows, kv_heads, OCTETS] of f16
@group(0) @binding(2) var<storage, read> v_cache: array<vec4<u32>>;    // [pool rows, kv_heads, OCTETS] of f16
@group(0) @binding(3) var<storage, read> batch: array<vec4<u32>>;      // [1 + tokens]
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;  // [tokens, kv_heads · GROUP, D / 4]
@group(0) @binding(5) var<uniform> params: Params;

var<workgroup> kv_tile: array<vec4<u32>, 2u * KEYS * KV_WIDE>;           // queries; then keys, and values after them
var<workgroup> score_tile: array<vec4<f32>, STACKED * SCORE_WIDE>;       // scores; sums where they need single values
var<workgroup> power_tile: array<vec4<u32>, STACKED * POWER_WIDE>;       // e, in f16
var<workgroup> kept: array<f32, STACKED>;                                // what sums are multiplied with
var<workgroup> rescaled: atomic<u32>;                                    // the last tile where that is not 1 for all rows

fn pool_rows() -> u32 {
    return arrayLength(&k_cache) / (params.kv_heads * OCTETS);
}

// The octet of a tile of keys or values that is the i-th of a lane: (key, octet of the key).
fn octet_of(i: u32, lane: u32) -> vec2<u32> {
    let index = i * WG + lane;
    return vec2<u32>(index / OCTETS, index % OCTETS);
}

// A page is read to its end, whatever is there; without pages the pool may end before.
fn cache_index(c: u32, start: u32, count: u32, kv_head: u32, octet: u32) -> u32 {
    const WHOLE = PAGED && KEYS * OCTETS % WG == 0u;
    return ((start + select(min(c, count - 1u), c, WHOLE)) * params.kv_heads + kv_head) * OCTETS + octet;
}

fn halves(a: vec4<f32>, b: vec4<f32>) -> vec4<u32> {
    return vec4<u32>(pack2x16float(a.xy), pack2x16float(a.zw), pack2x16float(b.xy), pack2x16float(b.zw));
}

// The largest and the sum over the lanes of a row.
fn row_max(value: f32) -> f32 {
    var largest = value;
    for (var offset = 1u; offset < LANES; offset = offset * 2u) {
        largest = max(largest, subgroupShuffleXor(largest, offset));
    }
    return largest;
}

fn row_sum(value: f32) -> f32 {
    var sum = value;
    for (var offset = 1u; offset < LANES; offset = offset * 2u) {
        sum = sum + subgroupShuffleXor(sum, offset);
    }
    return sum;
}

// Stages the queries of a tile of rows in kv_tile; what a lane's row of them was divided by.
fn stage_queries(t: u32, kv_head: u32, lane: u32) -> f32 {
    let pair = lane / LANES;
    let token = min(t + pair / GROUP, batch_rows() - 1u);
    let at = ((token * params.kv_heads + kv_head) * GROUP + pair % GROUP) * (D / 4u);
    var largest = vec4<f32>();
    // As often for every lane: compilers may let lanes that leave a loop early go on alone, and row_max needs them all.
    for (var i = 0u; i < (D / 4u + LANES - 1u) / LANES; i = i + 1u) {
        largest = max(largest, abs(q[at + min(i * LANES + lane % LANES, D / 4u - 1u)]));
    }
    let top = params.scale * max(max(largest.x, largest.y), max(largest.z, largest.w));
    let divisor = exp2(max(0.0, ceil(log2(max(row_max(top), 1.0)) - 15.0)));
    let factor = params.scale / divisor;
    for (var i = lane % LANES; i < OCTETS; i = i + LANES) {
        kv_tile[pair * KV_WIDE + i] = halves(q[at + 2u * i] * factor, q[at + 2u * i + 1u] * factor);
    }
    return divisor;
}

// Where matrix n of a subgroup's sums goes in score_tile, which has room for ROUND_TILES of each subgroup at once.
fn sums_at(first_pair: u32, columns: u32, r: u32, n: u32) -> u32 {
    return (first_pair + r * MATRIX_M) * SCORE_WIDE + columns * ROUND + n % ROUND_TILES * MATRIX_N / 4u;
}

// The rows segment.x … segment.y − 1 of the batch, of one sequence at consecutive positions; `t` is the first of the tile.
fn attend_segment(t: u32, segment: vec2<u32>, kv_head: u32, lane: u32) {
    let row = batch_row(segment.x);
    let last = min(row_last_key(row, segment.x, segment.y - 1u), pool_rows() - 1u);
    let subgroup = lane / SUBGROUP;
    let columns = subgroup % COLUMN_GROUPS;
    let first_pair = subgroup / COLUMN_GROUPS * (ROW_TILES * MATRIX_M);  // of this subgroup
    let pair = lane / LANES;                                      // of this lane, in softmax
    let part = lane % LANES;
    let token = t + pair / GROUP;
    // Pairs that are not of the segment compute what nobody stores.
    let position = row.position + (token - segment.x);
    let own_last = row_last_key(row, segment.x, token);

    let divisor = stage_queries(t, kv_head, lane);
    if (lane == 0u) {
        atomicStore(&rescaled, 0u);
    }
    workgroupBarrier();
    var queries: array<array<Left, DEPTH>, ROW_TILES>;  // registers
    for (var r = 0u; r < ROW_TILES; r = r + 1u) {  // unrolled
        for (var k = 0u; k < DEPTH; k = k + 1u) {  // unrolled
            let at = (first_pair + r * MATRIX_M) * KV_WIDE + k * MATRIX_K / 8u;
            queries[r][k] = subgroupMatrixLoad<Left, row_major>(&kv_tile, at, KV_WIDE);
        }
    }
    workgroupBarrier();  // kv_tile may be written again

    var sums: array<array<Result, SUM_TILES>, ROW_TILES>;  // registers
    for (var r = 0u; r < ROW_TILES; r = r + 1u) {  // unrolled
        for (var n = 0u; n < SUM_TILES; n = n + 1u) {  // unrolled
            sums[r][n] = Result();
        }
    }
    var top = LOWEST;
    var total = 0.0;
    var keys: array<vec4<u32>, LOADS>;  // registers
    var values: array<vec4<u32>, LOADS>;  // registers
    let least = first_key(min(row.position, last));  // of the first row
    let begin = least / KEYS * KEYS;
    var start = pool_row(row.pages, begin);
    var next_start = pool_row(row.pages, min(begin + KEYS, last));  // looked up a tile ahead
    var count = min(KEYS, last + 1u - begin);
    for (var i = 0u; i < LOADS; i = i + 1u) {  // unrolled
        let o = octet_of(i, lane);
        keys[i] = k_cache[cache_index(o.x, start, count, kv_head, o.y)];
    }
    for (var i = 0u; i < LOADS; i = i + 1u) {  // unrolled
        let o = octet_of(i, lane);
        if (KEYS * OCTETS % WG == 0u || o.x < KEYS) {
            kv_tile[o.x * KV_WIDE + o.y] = keys[i];
        }
    }
    workgroupBarrier();
    for (var first = begin; first <= last; first = first + KEYS) {
        let next = first + KEYS;
        let more = next <= last;
        for (var i = 0u; i < LOADS; i = i + 1u) {  // unrolled
            let o = octet_of(i, lane);
            let seen = o.x < count && (WINDOW == 0u || first + o.x >= least);
            values[i] = select(vec4<u32>(), v_cache[cache_index(o.x, start, count, kv_head, o.y)], seen);
        }
        if (more) {
            start = next_start;
            next_start = pool_row(row.pages, min(next + KEYS, last));
            count = min(KEYS, last + 1u - next);
        }
        var scores: array<array<Result, SCORE_TILES>, ROW_TILES>;  // registers
        for (var r = 0u; r < ROW_TILES; r = r + 1u) {  // unrolled
            for (var n = 0u; n < SCORE_TILES; n = n + 1u) {  // unrolled
                scores[r][n] = Result();
            }
        }
        for (var k = 0u; k < DEPTH; k = k + 1u) {  // unrolled
            for (var n = 0u; n < SCORE_TILES; n = n + 1u) {  // unrolled
                let at = (columns * SCORE_TILES + n) * MATRIX_N * KV_WIDE + k * MATRIX_K / 8u;
                let right = subgroupMatrixLoad<Right, col_major>(&kv_tile, at, KV_WIDE);
                for (var r = 0u; r < ROW_TILES; r = r + 1u) {  // unrolled
                    scores[r][n] = subgroupMatrixMultiplyAccumulate(queries[r][k], right, scores[r][n]);
                }
            }
        }
        for (var r = 0u; r < ROW_TILES; r = r + 1u) {  // unrolled
            for (var n = 0u; n < SCORE_TILES; n = n + 1u) {  // unrolled
                let at = (first_pair + r * MATRIX_M) * SCORE_WIDE + (columns * SCORE_TILES + n) * MATRIX_N / 4u;
                subgroupMatrixStore<row_major>(&score_tile, at, scores[r][n], SCORE_WIDE);
            }
        }
        workgroupBarrier();

        if (more) {
            for (var i = 0u; i < LOADS; i = i + 1u) {  // unrolled
                let o = octet_of(i, lane);
                keys[i] = k_cache[cache_index(o.x, start, count, kv_head, o.y)];
            }
        }
        var own: array<array<vec4<f32>, 2>, SHARE>;  // registers
        var largest = vec4<f32>(LOWEST);
        for (var i = 0u; i < SHARE; i = i + 1u) {  // unrolled
            let at = pair * SCORE_WIDE + 2u * (i * LANES + part);
            own[i][0u] = score_tile[at];
            own[i][1u] = score_tile[at + 1u];
        }
        if (SOFTCAP > 0.0) {
            for (var i = 0u; i < SHARE; i = i + 1u) {  // unrolled
                own[i][0u] = capped4(own[i][0u] * divisor) / divisor;
                own[i][1u] = capped4(own[i][1u] * divisor) / divisor;
            }
        }
        if (WINDOW > 0u && first < first_key(last)) {
            let before = vec4<f32>(LOWEST / divisor);
            for (var i = 0u; i < SHARE; i = i + 1u) {  // unrolled
                let c = first + 8u * (i * LANES + part) + vec4<u32>(0u, 1u, 2u, 3u) + WINDOW;
                own[i][0u] = select(before, own[i][0u], c > vec4<u32>(position));
                own[i][1u] = select(before, own[i][1u], c + 4u > vec4<u32>(position));
            }
        }
        if (next > row.position + 1u) {
            let end = vec4<u32>(min(own_last, last));
            let lowest = vec4<f32>(LOWEST / divisor);
            for (var i = 0u; i < SHARE; i = i + 1u) {  // unrolled
                let c = first + 8u * (i * LANES + part) + vec4<u32>(0u, 1u, 2u, 3u);
                own[i][0u] = select(lowest, own[i][0u], c <= end);
                own[i][1u] = select(lowest, own[i][1u], c + 4u <= end);
            }
        }
        for (var i = 0u; i < SHARE; i = i + 1u) {  // unrolled
            largest = max(largest, max(own[i][0u], own[i][1u]));
        }
        let found = divisor * row_max(max(max(largest.x, largest.y), max(largest.z, largest.w)));
        var factor = 1.0;
        if (found > top + MARGIN) {
            factor = exp2(top - found);
            top = found;
            total = total * factor;
            if (first > begin) {
                atomicStore(&rescaled, first);
            }
        }
        if (part == 0u) {
            kept[pair] = factor;
        }
        // All subgroups are through with the keys of this tile and the values of the last one.
        for (var i = 0u; i < LOADS; i = i + 1u) {  // unrolled
            let o = octet_of(i, lane);
            if (KEYS * OCTETS % WG == 0u || o.x < KEYS) {
                kv_tile[(KEYS + o.x) * KV_WIDE + o.y] = values[i];
                if (more) {
                    kv_tile[o.x * KV_WIDE + o.y] = keys[i];
                }
            }
        }
        var powers = vec4<f32>();
        for (var i = 0u; i < SHARE; i = i + 1u) {  // unrolled
            let a = exp2(own[i][0u] * divisor - top);
            let b = exp2(own[i][1u] * divisor - top);
            powers = powers + a + b;
            power_tile[pair * POWER_WIDE + i * LANES + part] = halves(a, b);
        }
        total = total + (powers.x + powers.y) + (powers.z + powers.w);
        let changed = workgroupUniformLoad(&rescaled);  // a barrier
        if (first > begin && changed == first) {
            for (var round = 0u; round < ROUNDS; round = round + 1u) {  // unrolled
                for (var r = 0u; r < ROW_TILES; r = r + 1u) {  // unrolled
                    for (var n = 0u; n < SUM_TILES; n = n + 1u) {  // unrolled
                        if (n / ROUND_TILES == round) {
                            let at = sums_at(first_pair, columns, r, n);
                            subgroupMatrixStore<row_major>(&score_tile, at, sums[r][n], SCORE_WIDE);
                        }
                    }
                }
                workgroupBarrier();
                for (var i = part; i < COLUMN_GROUPS * ROUND; i = i + LANES) {
                    let at = pair * SCORE_WIDE + i;
                    score_tile[at] = score_tile[at] * kept[pair];
                }
                workgroupBarrier();
                for (var r = 0u; r < ROW_TILES; r = r + 1u) {  // unrolled
                    for (var n = 0u; n < SUM_TILES; n = n + 1u) {  // unrolled
                        if (n / ROUND_TILES == round) {
                            let at = sums_at(first_pair, columns, r, n);
                            sums[r][n] = subgroupMatrixLoad<Result, row_major>(&score_tile, at, SCORE_WIDE);
                        }
                    }
                }
                workgroupBarrier();
            }
        }
        for (var k = 0u; k < KEYS / MATRIX_K; k = k + 1u) {  // unrolled
            var left: array<Left, ROW_TILES>;  // registers
            for (var r = 0u; r < ROW_TILES; r = r + 1u) {  // unrolled
                let at = (first_pair + r * MATRIX_M) * POWER_WIDE + k * MATRIX_K / 8u;
                left[r] = subgroupMatrixLoad<Left, row_major>(&power_tile, at, POWER_WIDE);
            }
            for (var n = 0u; n < SUM_TILES; n = n + 1u) {  // unrolled
                let at = (KEYS + k * MATRIX_K) * KV_WIDE + (columns * SUM_TILES + n) * MATRIX_N / 8u;
                let right = subgroupMatrixLoad<Right, row_major>(&kv_tile, at, KV_WIDE);
                for (var r = 0u; r < ROW_TILES; r = r + 1u) {  // unrolled
                    sums[r][n] = subgroupMatrixMultiplyAccumulate(left[r], right, sums[r][n]);
                }
            }
        }
    }
    total = row_sum(total);
    if (SINKS) {  // in powers of two, which must stay finite
        total = total + exp2(min(sink_of(kv_head * GROUP + pair % GROUP) * 1.442695 - top, 126.0));
    }
    let at_out = ((token * params.kv_heads + kv_head) * GROUP + pair % GROUP) * (D / 4u);
    for (var round = 0u; round < ROUNDS; round = round + 1u) {  // unrolled
        workgroupBarrier();  // score_tile and kv_tile may be written again
        for (var r = 0u; r < ROW_TILES; r = r + 1u) {  // unrolled
            for (var n = 0u; n < SUM_TILES; n = n + 1u) {  // unrolled
                if (n / ROUND_TILES == round) {
                    let at = sums_at(first_pair, columns, r, n);
                    subgroupMatrixStore<row_major>(&score_tile, at, sums[r][n], SCORE_WIDE);
                }
            }
        }
        workgroupBarrier();
        if (token >= segment.x && token < segment.y && pair < ROWS * GROUP) {
            for (var i = part; i < COLUMN_GROUPS * ROUND; i = i + LANES) {
                let quad = (i / ROUND * SUM_TILES + round * ROUND_TILES) * MATRIX_N / 4u + i % ROUND;
                out[at_out + quad] = score_tile[pair * SCORE_WIDE + i] / total;
            }
        }
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let kv_head = index % params.kv_heads;
    let tiles = (batch_rows() + ROWS - 1u) / ROWS;
    if (index / params.kv_heads >= tiles) {
        return;
    }
    let t = (tiles - 1u - index / params.kv_heads) * ROWS;
    let end = min(t + ROWS, batch_rows());
    var first = next_row(t, 1u, end);
    while (first < end) {
        let next = end_of_segment(first, end);
        attend_segment(t, vec2<u32>(first, next), kv_head, lane);
        first = next_row(next, 1u, end);
        workgroupBarrier();  // what the last segment had in workgroup memory has been read
    }
}
