// out[tokens, n] = epilogue(row_scale[tokens] · Σ_k x_half[tokens, k] · w[n, k])        few rows, k that a workgroup can take
// The matrix units, the format's f16 weights and what becomes of the sums are included. Products of f16, sums in f32.
// A workgroup takes BM rows; each of its SUBS subgroups has BLOCKS blocks of 32 of their k, and keeps these inputs as
// matrices in registers. Weights pass by: tiles of BN columns, `spread` tiles apart. A subgroup dequantises its blocks of
// a tile in four steps, 8 weights of every block at a time, into its own part of workgroup memory, and multiplies them,
// while those of the next tile are on their way. With two buffers a step needs one barrier instead of two. The sums
// of the subgroups are added up through workgroup memory: those of a tile while the next one is multiplied. A k that is too
// long is in `split` parts.
// Edge lanes clamp their row and block; inputs past the end of k are 0. Rows of x_half past the last are never stored.
// Grid: tiles of rows × spread workgroups × parts, folded. Needs k % 32 == 0, k ≤ 32 · BLOCKS · SUBS · split, and subgroups
// of SUBGROUP consecutive lanes.

const SUBGROUP: u32 = 32u;
const MATRIX_M: u32 = 16u;
const MATRIX_N: u32 = 16u;
const MATRIX_K: u32 = 16u;
const TM: u32 = 1u;
const TN: u32 = 1u;
const BLOCKS: u32 = 8u;
const SUBS: u32 = 8u;
const BUFFERS: u32 = 1u;

const WG: u32 = SUBGROUP * SUBS;
const BM: u32 = TM * MATRIX_M;
const BN: u32 = TN * MATRIX_N;
const WORDS: u32 = MATRIX_K / 8u;                 // vec4<u32> of a row of a matrix
const KS: u32 = BLOCKS / WORDS;                   // matrices of a step along k
const STRIDE: u32 = BLOCKS + 1u;                  // one more than needed: rows then start in different banks
const REGION: u32 = BN * STRIDE;
const LANE_BLOCKS: u32 = BN * BLOCKS / SUBGROUP;
const STRIP_ROW: u32 = BN / 4u;                   // vec4<f32> of a row of sums
const STRIP: u32 = BM * STRIP_ROW;
const STRIPS: u32 = SUBS * BUFFERS * REGION;      // where the sums begin
const TILE: u32 = STRIPS + SUBS * STRIP;
const TOGETHER: u32 = max(1u, 8u / BLOCKS);       // rows of weights that 8 lanes fetch from

struct Params {
    tokens: u32,
    k: u32,           // multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // groups of scales per row
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,     // length of a row of out
    epilogue: u32,    // what becomes of the sums
    spread: u32,      // workgroups that share the columns
    split: u32,       // parts of k
    queries: u32,     // rows of queries, for rope and the cache
    keys: u32,        // rows of keys, and as many of values
    width: u32,       // D
    rotary: u32,      // elements of a head that are rotated
}

@group(0) @binding(0) var<storage, read> x_half: array<vec4<u32>>; // [tiles of MATRIX_M rows, matrices, MATRIX_M, WORDS]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // [n, groups] as the format has them
@group(0) @binding(3) var<uniform> params: Params;

var<workgroup> tile: array<vec4<u32>, TILE>;

// The row of a tile whose block a lane fetches: so that 8 lanes write to different banks.
fn row_of(i: u32) -> u32 {
    let row = i / BLOCKS;
    return row / 8u * 8u + row % TOGETHER * BLOCKS + row % 8u / TOGETHER;
}

fn weight_row(i: u32, n0: u32) -> u32 {
    return min(n0 + row_of(i), params.n - 1u);
}

fn block_of(i: u32, first_block: u32) -> u32 {
    return min(first_block + i % BLOCKS, params.k / 32u - 1u);
}

fn finish_tile(part: u32, m0: u32, n0: u32, lane: u32) {
    for (var e = lane; e < STRIP; e = e + WG) {
        var total = vec4<f32>();
        for (var s = 0u; s < SUBS; s = s + 1u) {
            total = total + bitcast<vec4<f32>>(tile[STRIPS + s * STRIP + e]);
        }
        finish_part(part, m0 + e / STRIP_ROW, n0 + 4u * (e % STRIP_ROW), total);
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    // By the rows that there are, not those of the bucket: workgroups without work come last.
    let tiles_m = (row_count() + BM - 1u) / BM;
    let index = group.x + group.y * groups.x;
    if (index >= tiles_m * params.spread * params.split) {
        return;
    }
    let m0 = index % tiles_m * BM;
    let first = index / tiles_m % params.spread;
    let part = index / (tiles_m * params.spread);
    let tiles = (params.n + BN - 1u) / BN;
    let subgroup = lane / SUBGROUP;
    let sub_lane = lane % SUBGROUP;
    let slice = part * SUBS + subgroup;  // of k
    let first_block = slice * BLOCKS;
    matrix_lane(lane);
    var raw: array<Raw, LANE_BLOCKS>;  // registers
    for (var i = 0u; i < LANE_BLOCKS; i = i + 1u) {  // unrolled
        let at = sub_lane + i * SUBGROUP;
        raw[i] = fetch(weight_row(at, first * BN), block_of(at, first_block));
    }
    var inputs: array<array<array<Inputs, KS>, 4>, TM>;  // registers
    for (var i = 0u; i < TM; i = i + 1u) {  // unrolled
        let matrices = ((m0 / MATRIX_M + i) * SUBS * params.split + slice) * 4u * KS;
        for (var step = 0u; step < 4u; step = step + 1u) {  // unrolled
            for (var s = 0u; s < KS; s = s + 1u) {  // unrolled
                inputs[i][step][s] = load_inputs((matrices + step * KS + s) * MATRIX_M * WORDS, WORDS);
            }
        }
    }
    var sums: array<array<Result, TN>, TM>;  // registers
    for (var now = first; now < tiles; now = now + params.spread) {
        for (var i = 0u; i < TM; i = i + 1u) {  // unrolled
            for (var j = 0u; j < TN; j = j + 1u) {  // unrolled
                sums[i][j] = Result();
            }
        }
        for (var step = 0u; step < 4u; step = step + 1u) {  // unrolled
            let base = (subgroup * BUFFERS + step % BUFFERS) * REGION;
            for (var i = 0u; i < LANE_BLOCKS; i = i + 1u) {  // unrolled
                let at = sub_lane + i * SUBGROUP;
                tile[base + row_of(at) * STRIDE + at % BLOCKS] =
                    eight_halves(raw[i], weight_row(at, now * BN), block_of(at, first_block), step);
            }
            if (step == 3u) {
                for (var i = 0u; i < LANE_BLOCKS; i = i + 1u) {  // unrolled
                    let at = sub_lane + i * SUBGROUP;
                    raw[i] = fetch(weight_row(at, (now + params.spread) * BN), block_of(at, first_block));
                }
            }
            workgroupBarrier();
            for (var s = 0u; s < KS; s = s + 1u) {  // unrolled
                for (var j = 0u; j < TN; j = j + 1u) {  // unrolled
                    let right = load_right(base + s * WORDS + j * MATRIX_N * STRIDE, STRIDE);
                    for (var i = 0u; i < TM; i = i + 1u) {  // unrolled
                        sums[i][j] = multiply_inputs(inputs[i][step][s], right, sums[i][j]);
                    }
                }
            }
            if (step == 0u && now > first) {
                finish_tile(part, m0, (now - params.spread) * BN, lane);
            }
            if (BUFFERS == 1u) {
                workgroupBarrier();
            }
        }
        for (var i = 0u; i < TM; i = i + 1u) {  // unrolled
            for (var j = 0u; j < TN; j = j + 1u) {  // unrolled
                store_result(
                    STRIPS + subgroup * STRIP + i * MATRIX_M * STRIP_ROW + j * (MATRIX_N / 4u), sums[i][j], STRIP_ROW);
            }
        }
    }
    workgroupBarrier();
    finish_tile(part, m0, (first + (tiles - 1u - first) / params.spread * params.spread) * BN, lane);
}
