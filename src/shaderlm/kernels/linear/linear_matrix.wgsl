// out[tokens, n] = epilogue(row_scale[tokens] · Σ_k x_half[tokens, k] · w[n, k])
// The matrix units, the format's f16 weights, which tile a workgroup takes (of all rows, or of the rows that chose an
// expert) and what becomes of the sums are included. Products of f16, sums in f32.
// A workgroup computes a tile of BM rows × BN columns, over all of k or over one of `split` parts of it. A group is
// BLOCKS blocks of 32 weights of each row: neighbouring lanes fetch neighbouring blocks, into registers. It is multiplied
// in four steps, each of 8 weights of every block: dequantised once per tile, staged in workgroup memory beside the inputs
// in the same order of k (round_rows), while what comes next is on its way.
// Subgroups share the tile by rows (SUBS_M), columns (SUBS_N) and k (SUBS_K); each has TM × TN matrices of sums. With two
// buffers a step needs one barrier instead of two. Results go through the same workgroup memory, one strip of
// MATRIX_M rows of each subgroup at a time.
// Edge lanes clamp their row, what lies past the end of k counts as 0. Grid: one workgroup per tile and part, folded.
// Needs k % 32 == 0, and subgroups of SUBGROUP consecutive lanes.

const SUBGROUP: u32 = 32u;
const MATRIX_M: u32 = 16u;
const MATRIX_N: u32 = 16u;
const MATRIX_K: u32 = 16u;
const BM: u32 = 64u;
const BN: u32 = 64u;
const BLOCKS: u32 = 8u;
const SUBS_M: u32 = 2u;
const SUBS_N: u32 = 2u;
const SUBS_K: u32 = 1u;
const BUFFERS: u32 = 1u;
const AHEAD: u32 = 1u;  // steps whose inputs are fetched at a time: 1, or the 4 of a group
const FETCH: u32 = 3u;  // the step of a group in which the next group is fetched

const WG: u32 = SUBGROUP * SUBS_M * SUBS_N * SUBS_K;
const TM: u32 = BM / (SUBS_M * MATRIX_M);
const TN: u32 = BN / (SUBS_N * MATRIX_N);
const KS: u32 = 8u * BLOCKS / (SUBS_K * MATRIX_K);       // matrices of a step along k, of a subgroup
const STRIDE: u32 = BLOCKS + 1u;                         // one more than needed: rows then start in different banks
const STAGED: u32 = (BM + BN) * STRIDE;                  // of a step, rows of x first
const LANE_BLOCKS: u32 = (BN * BLOCKS + WG - 1u) / WG;   // of a group, of a lane
const LANE_WORDS: u32 = (BM * BLOCKS + WG - 1u) / WG;    // of the inputs of a step, of a lane
const STRIP_ROW: u32 = TN * MATRIX_N / 4u;               // vec4<f32> of a row of a subgroup's strip
const STRIP: u32 = MATRIX_M * STRIP_ROW;
const STRIPS: u32 = SUBS_M * SUBS_N * SUBS_K * STRIP;
const TILE: u32 = max(BUFFERS * STAGED, STRIPS);

@group(0) @binding(0) var<storage, read> x_half: array<vec4<u32>>; // [rows of x, groups of blocks, 4, BLOCKS]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // [n, groups] as the format has them
@group(0) @binding(3) var<uniform> params: Params;

var<workgroup> tile: array<vec4<u32>, TILE>;

fn block_count() -> u32 {
    return params.k / 32u;
}

fn group_count() -> u32 {
    return (block_count() + BLOCKS - 1u) / BLOCKS;
}

// The row of the tile whose block a lane fetches: if fewer than 8 lanes share a row, rows are taken so that 8 lanes write
// to different banks.
fn row_of(i: u32) -> u32 {
    let row = i / BLOCKS;
    if (BLOCKS == 4u) {
        return row / 8u * 8u + row % 2u * 4u + row % 8u / 2u;
    }
    return row;
}

fn fetch_block(i: u32, n0: u32, group: u32, end: u32) -> Raw {
    let block = group * BLOCKS + i % BLOCKS;
    if (i < BN * BLOCKS && group < end && block < block_count()) {
        return fetch(weight_row(min(n0 + row_of(i), params.n - 1u)), block);
    }
    return Raw();  // as weights these are zeros
}

fn fetch_x(i: u32, m0: u32, rows: u32, step: u32, end: u32) -> vec4<u32> {
    if (i < BM * BLOCKS && step < 4u * end) {
        let row = input_row(min(m0 + i / BLOCKS, rows - 1u));
        return x_half[(row * group_count() * 4u + step) * BLOCKS + i % BLOCKS];
    }
    return vec4<u32>();
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let own = find_tile(group.x + group.y * groups.x);
    if (!own.there) {
        return;
    }
    let part = own.part;
    let m0 = own.m0;
    let n0 = own.n0;
    let rows = own.rows;
    let each = (group_count() + params.split - 1u) / params.split;
    let first = part * each;
    let end = min(group_count(), first + each);
    let subgroup = lane / SUBGROUP;
    let sub_m = subgroup % SUBS_M;
    let sub_n = subgroup / SUBS_M % SUBS_N;
    let sub_k = subgroup / (SUBS_M * SUBS_N);
    matrix_lane(lane);
    var sums: array<array<Result, TN>, TM>;  // registers
    var raw: array<Raw, LANE_BLOCKS>;  // registers
    var next_raw: array<Raw, LANE_BLOCKS>;  // registers
    var words: array<array<vec4<u32>, LANE_WORDS>, 4>;  // registers
    var next_words: array<array<vec4<u32>, LANE_WORDS>, 4>;  // registers
    for (var i = 0u; i < LANE_BLOCKS; i = i + 1u) {  // unrolled
        raw[i] = fetch_block(lane + i * WG, n0, first, end);
    }
    for (var step = 0u; step < AHEAD; step = step + 1u) {  // unrolled
        for (var i = 0u; i < LANE_WORDS; i = i + 1u) {  // unrolled
            words[step][i] = fetch_x(lane + i * WG, m0, rows, 4u * first + step, end);
        }
    }
    for (var k = first; k < end; k = k + 1u) {
        for (var eighth = 0u; eighth < 4u; eighth = eighth + 1u) {  // unrolled
            let base = eighth % BUFFERS * STAGED;
            for (var i = 0u; i < LANE_BLOCKS; i = i + 1u) {  // unrolled
                let at = lane + i * WG;
                if (at < BN * BLOCKS) {
                    let row = row_of(at);
                    tile[base + (BM + row) * STRIDE + at % BLOCKS] =
                        eight_halves(raw[i], weight_row(min(n0 + row, params.n - 1u)), k * BLOCKS + at % BLOCKS, eighth);
                }
            }
            for (var i = 0u; i < LANE_WORDS; i = i + 1u) {  // unrolled
                let at = lane + i * WG;
                if (at < BM * BLOCKS) {
                    tile[base + at / BLOCKS * STRIDE + at % BLOCKS] = words[eighth][i];
                }
            }
            workgroupBarrier();
            if (eighth == FETCH) {
                for (var i = 0u; i < LANE_BLOCKS; i = i + 1u) {  // unrolled
                    next_raw[i] = fetch_block(lane + i * WG, n0, k + 1u, end);
                }
            }
            for (var step = 0u; step < 4u; step = step + 1u) {  // unrolled
                for (var i = 0u; i < LANE_WORDS; i = i + 1u) {  // unrolled
                    if (AHEAD == 4u && eighth == FETCH) {
                        next_words[step][i] = fetch_x(lane + i * WG, m0, rows, 4u * k + 4u + step, end);
                    }
                    if (AHEAD == 1u && step == (eighth + 1u) % 4u) {
                        words[step][i] = fetch_x(lane + i * WG, m0, rows, 4u * k + eighth + 1u, end);
                    }
                }
            }
            for (var s = 0u; s < KS; s = s + 1u) {  // unrolled
                let column = base + (sub_k * KS + s) * (MATRIX_K / 8u);
                var right: array<Right, TN>;  // registers
                for (var j = 0u; j < TN; j = j + 1u) {  // unrolled
                    right[j] = load_right(column + (BM + (sub_n * TN + j) * MATRIX_N) * STRIDE, STRIDE);
                }
                for (var i = 0u; i < TM; i = i + 1u) {  // unrolled
                    let left = load_left(column + (sub_m * TM + i) * MATRIX_M * STRIDE, STRIDE);
                    for (var j = 0u; j < TN; j = j + 1u) {  // unrolled
                        sums[i][j] = multiply(left, right[j], sums[i][j]);
                    }
                }
            }
            if (BUFFERS == 1u) {
                workgroupBarrier();
            }
        }
        for (var i = 0u; i < LANE_BLOCKS; i = i + 1u) {  // unrolled
            raw[i] = next_raw[i];
        }
        for (var step = 0u; step < AHEAD; step = step + 1u) {  // unrolled
            for (var i = 0u; i < LANE_WORDS; i = i + 1u) {  // unrolled
                if (AHEAD == 4u) {
                    words[step][i] = next_words[step][i];
                }
            }
        }
    }
    for (var i = 0u; i < TM; i = i + 1u) {  // unrolled
        workgroupBarrier();  // what the strips overwrite was read
        for (var j = 0u; j < TN; j = j + 1u) {  // unrolled
            store_result(subgroup * STRIP + j * (MATRIX_N / 4u), sums[i][j], STRIP_ROW);
        }
        workgroupBarrier();
        for (var e = lane; e < SUBS_M * SUBS_N * STRIP; e = e + WG) {
            var total = vec4<f32>();
            for (var s = 0u; s < SUBS_K; s = s + 1u) {
                total = total + bitcast<vec4<f32>>(tile[e + s * SUBS_M * SUBS_N * STRIP]);
            }
            let owner = e / STRIP;
            let m = m0 + ((owner % SUBS_M) * TM + i) * MATRIX_M + e % STRIP / STRIP_ROW;
            finish(part, m, n0 + owner / SUBS_M * TN * MATRIX_N + 4u * (e % STRIP_ROW), total);
        }
    }
}
