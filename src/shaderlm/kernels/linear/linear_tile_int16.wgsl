// out[tokens, n] = epilogue(Σ_k x[tokens, k] · w[n, k])        x rounded to 16 bits before, by round_rows_int16
// A workgroup computes a tile of TM · THREADS_M rows × 4 · THREADS_N columns; a thread TM rows (4 or 8), THREADS_M apart, of
// four neighbouring columns. Its SLICES share k, so that small products have threads enough: each step stages BLOCKS blocks
// of 32 for each slice in workgroup memory, weights as they lie, while those of the next step are on their way. Sums of the
// slices are added up at the end. Which tile a workgroup takes, the format of the weights (load_block), its int16_dot, how
// it is staged (stage_block) and what becomes of the sums (store_row) are included.
// Edge threads clamp their rows and never store; blocks past the end of k count as zeros.
// Grid: one workgroup per tile, folded. Needs: k % 32 == 0; SLICES a power of two, and 1 unless THREADS_N ≤ 8 · BLOCKS; per
// step and thread at most four vectors of x, two units and two blocks of weights.

const TM: u32 = 8u;
const THREADS_M: u32 = 16u;
const THREADS_N: u32 = 16u;
const SLICES: u32 = 1u;
const BLOCKS: u32 = 1u;

const LANES_PER_SLICE: u32 = THREADS_M * THREADS_N;
const WG: u32 = LANES_PER_SLICE * SLICES;
const BM: u32 = TM * THREADS_M;
const BN: u32 = 4u * THREADS_N;
const STEP: u32 = SLICES * BLOCKS;         // blocks of a row that are staged at a time
// Odd numbers of vectors: rows then start in different banks.
const X_STRIDE: u32 = 4u * STEP + 1u;
const STRIDE: u32 = STEP / 2u * 2u + 1u;   // of a row of units, or of blocks of weights
// Weights of columns 0, 4, 8 … lie together, then those of 1, 5, 9 …: threads, which have four neighbouring columns, read
// neighbours. STEP more per group, so that those who stage neighbouring columns hit different banks, too.
const GROUP: u32 = THREADS_N * STRIDE + STEP;
const W_SLOTS: u32 = 4u * GROUP;

@group(0) @binding(0) var<storage, read> bytes: array<vec4<u32>>;  // [rows of x, k / 32, 4], as round_rows_int16 writes them
@group(0) @binding(1) var<storage, read> units: array<vec4<f32>>;  // [rows of x, k / 32]
@group(0) @binding(2) var<storage, read> weight: array<vec4<u32>>; // [n, …] as the included format lays it out
@group(0) @binding(3) var<storage, read> scales: array<u32>;       // [n, groups] as the format has them
@group(0) @binding(4) var<uniform> params: Params;

var<workgroup> x_tile: array<vec4<u32>, BM * X_STRIDE>;  // at the end, sums of slices
var<workgroup> x_unit: array<vec4<f32>, BM * STRIDE>;

const X_COUNT: u32 = BM * 4u * STEP;
const UNITS: u32 = BM * STEP;
const W_COUNT: u32 = BN * STEP;

// What a thread loads for a step: neighbours load neighbouring blocks of a row.
fn fetch_x(i: u32, m0: u32, rows: u32, base: u32) -> vec4<u32> {
    let row = input_row(min(m0 + i / (4u * STEP), rows - 1u));
    return bytes[row * (params.k / 8u) + min(4u * base + i % (4u * STEP), params.k / 8u - 1u)];
}

fn fetch_unit(i: u32, m0: u32, rows: u32, base: u32) -> vec4<f32> {
    let blocks = params.k / 32u;
    let block = base + i % STEP;
    let row = input_row(min(m0 + i / STEP, rows - 1u));
    return select(vec4<f32>(), units[row * blocks + min(block, blocks - 1u)], block < blocks);
}

fn fetch_w(i: u32, n0: u32, base: u32) -> Packed {
    return load_block(weight_row(min(n0 + i / STEP, params.n - 1u)), min(base + i % STEP, params.k / 32u - 1u));
}

fn stage_x(i: u32, value: vec4<u32>) {
    x_tile[i / (4u * STEP) * X_STRIDE + i % (4u * STEP)] = value;
}

fn stage_unit(i: u32, value: vec4<f32>) {
    x_unit[i / STEP * STRIDE + i % STEP] = value;
}

fn stage_w(i: u32, value: Packed) {
    let column = i / STEP;
    stage_block(column % 4u * GROUP + column / 4u * STRIDE + i % STEP, value);
}

// The same block of a thread's four columns, and its products with a block of a row of x.
struct Weights {
    a: Packed, b: Packed, c: Packed, d: Packed,
}

fn products(w: Weights, row: u32, block: u32) -> vec4<f32> {
    let at = row * X_STRIDE + 4u * block;
    let first = Sixteen(x_tile[at], x_tile[at + 1u]);
    let second = Sixteen(x_tile[at + 2u], x_tile[at + 3u]);
    let unit = x_unit[row * STRIDE + block].xyz;
    return vec4<f32>(
        int16_dot(w.a, first, second, unit), int16_dot(w.b, first, second, unit),
        int16_dot(w.c, first, second, unit), int16_dot(w.d, first, second, unit),
    );
}

fn give_sum(i: u32, at: u32, sum: vec4<f32>) {
    x_tile[(at / LANES_PER_SLICE * TM + i) * LANES_PER_SLICE + at % LANES_PER_SLICE] = bitcast<vec4<u32>>(sum);
}

fn taken_sum(i: u32, at: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(x_tile[(at / LANES_PER_SLICE * TM + i) * LANES_PER_SLICE + at % LANES_PER_SLICE]);
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
    let m0 = own.m0;
    let n0 = own.n0;
    let rows = own.rows;
    let blocks = params.k / 32u;
    let slice = lane / LANES_PER_SLICE;
    let tx = lane % THREADS_N;
    let ty = lane % LANES_PER_SLICE / THREADS_N;
    var acc0 = vec4<f32>();
    var acc1 = vec4<f32>();
    var acc2 = vec4<f32>();
    var acc3 = vec4<f32>();
    var acc4 = vec4<f32>();
    var acc5 = vec4<f32>();
    var acc6 = vec4<f32>();
    var acc7 = vec4<f32>();
    // Threads past the end of what is staged load something and do not store it.
    var x0 = fetch_x(lane, m0, rows, 0u);
    var x1 = x0;
    var x2 = x0;
    var x3 = x0;
    if (X_COUNT > WG) {
        x1 = fetch_x(lane + WG, m0, rows, 0u);
    }
    if (X_COUNT > 2u * WG) {
        x2 = fetch_x(lane + 2u * WG, m0, rows, 0u);
        x3 = fetch_x(lane + 3u * WG, m0, rows, 0u);
    }
    var u0 = fetch_unit(lane, m0, rows, 0u);
    var u1 = u0;
    if (UNITS > WG) {
        u1 = fetch_unit(lane + WG, m0, rows, 0u);
    }
    var w0 = fetch_w(lane, n0, 0u);
    var w1 = w0;
    if (W_COUNT > WG) {
        w1 = fetch_w(lane + WG, n0, 0u);
    }
    for (var base = 0u; base < blocks; base = base + STEP) {
        if (lane < X_COUNT) {
            stage_x(lane, x0);
        }
        if (lane + WG < X_COUNT) {
            stage_x(lane + WG, x1);
        }
        if (lane + 2u * WG < X_COUNT) {
            stage_x(lane + 2u * WG, x2);
        }
        if (lane + 3u * WG < X_COUNT) {
            stage_x(lane + 3u * WG, x3);
        }
        if (lane < UNITS) {
            stage_unit(lane, u0);
        }
        if (lane + WG < UNITS) {
            stage_unit(lane + WG, u1);
        }
        if (lane < W_COUNT) {
            stage_w(lane, w0);
        }
        if (lane + WG < W_COUNT) {
            stage_w(lane + WG, w1);
        }
        workgroupBarrier();
        let ahead = base + STEP;
        x0 = fetch_x(lane, m0, rows, ahead);
        if (X_COUNT > WG) {
            x1 = fetch_x(lane + WG, m0, rows, ahead);
        }
        if (X_COUNT > 2u * WG) {
            x2 = fetch_x(lane + 2u * WG, m0, rows, ahead);
            x3 = fetch_x(lane + 3u * WG, m0, rows, ahead);
        }
        u0 = fetch_unit(lane, m0, rows, ahead);
        if (UNITS > WG) {
            u1 = fetch_unit(lane + WG, m0, rows, ahead);
        }
        w0 = fetch_w(lane, n0, ahead);
        if (W_COUNT > WG) {
            w1 = fetch_w(lane + WG, n0, ahead);
        }
        for (var i = 0u; i < BLOCKS; i = i + 1u) {
            let block = i * SLICES + slice;
            let at = tx * STRIDE + block;
            let w = Weights(
                staged_block(at), staged_block(at + GROUP), staged_block(at + 2u * GROUP), staged_block(at + 3u * GROUP),
            );
            acc0 = acc0 + products(w, ty, block);
            acc1 = acc1 + products(w, ty + THREADS_M, block);
            acc2 = acc2 + products(w, ty + 2u * THREADS_M, block);
            acc3 = acc3 + products(w, ty + 3u * THREADS_M, block);
            if (TM > 4u) {
                acc4 = acc4 + products(w, ty + 4u * THREADS_M, block);
                acc5 = acc5 + products(w, ty + 5u * THREADS_M, block);
                acc6 = acc6 + products(w, ty + 6u * THREADS_M, block);
                acc7 = acc7 + products(w, ty + 7u * THREADS_M, block);
            }
        }
        workgroupBarrier();
    }
    for (var half = SLICES / 2u; half > 0u; half = half / 2u) {
        if (slice >= half && slice < 2u * half) {
            let at = lane - half * LANES_PER_SLICE;
            give_sum(0u, at, acc0);
            give_sum(1u, at, acc1);
            give_sum(2u, at, acc2);
            give_sum(3u, at, acc3);
            if (TM > 4u) {
                give_sum(4u, at, acc4);
                give_sum(5u, at, acc5);
                give_sum(6u, at, acc6);
                give_sum(7u, at, acc7);
            }
        }
        workgroupBarrier();
        if (slice < half) {
            acc0 = acc0 + taken_sum(0u, lane);
            acc1 = acc1 + taken_sum(1u, lane);
            acc2 = acc2 + taken_sum(2u, lane);
            acc3 = acc3 + taken_sum(3u, lane);
            if (TM > 4u) {
                acc4 = acc4 + taken_sum(4u, lane);
                acc5 = acc5 + taken_sum(5u, lane);
                acc6 = acc6 + taken_sum(6u, lane);
                acc7 = acc7 + taken_sum(7u, lane);
            }
        }
        workgroupBarrier();
    }
    if (slice == 0u) {
        let n = n0 + 4u * tx;
        store_row(m0 + ty, n, acc0);
        store_row(m0 + ty + THREADS_M, n, acc1);
        store_row(m0 + ty + 2u * THREADS_M, n, acc2);
        store_row(m0 + ty + 3u * THREADS_M, n, acc3);
        if (TM > 4u) {
            store_row(m0 + ty + 4u * THREADS_M, n, acc4);
            store_row(m0 + ty + 5u * THREADS_M, n, acc5);
            store_row(m0 + ty + 6u * THREADS_M, n, acc6);
            store_row(m0 + ty + 7u * THREADS_M, n, acc7);
        }
    }
}
