// out[m, n] = epilogue(Σ_k q(prologue(x))[m, k] · w[n, k])        q rounds to 16 bits with one scale per block of 32
// As linear_gemv_int16, for several rows of x: a workgroup has X_ROWS of them (2, 4 or 8), and a block of weights in registers
// serves all. Every workgroup rounds its rows for itself, STAGE blocks of each at a time, four lanes to a block: as many lanes
// for each row. That takes less than a dispatch of its own. A lane group computes X_ROWS × ROWS results (ROWS 1, 2 or 4); its
// lanes share k in blocks of 32, and lane i stores row i of x, so that not all wait for one.
// Inputs, prologue, epilogue, format of the weights (load_block) and its int16_dot are included.
// Edge lane groups clamp their rows and never store; so do rows of x past the last.
// Grid: ceil(tokens / X_ROWS) · ceil(n / (ROWS · WG / LANES_PER_ROW)) workgroups, folded. Needs: k % 32 == 0; subgroups of four
// lanes or more, of consecutive lanes; WG % (4 · X_ROWS) == 0; LANES_PER_ROW a power of two, X_ROWS or more; STAGE a multiple of
// LANES_PER_ROW, or all blocks; even n and ROWS > 1 where the epilogue takes rows in pairs.

const WG: u32 = 256u;
const LANES_PER_ROW: u32 = 16u;
const ROWS: u32 = 4u;
const X_ROWS: u32 = 4u;
const STAGE: u32 = 64u;

const STORED: u32 = ROWS;
const STAGED: u32 = X_ROWS * STAGE;
const ROUNDERS: u32 = WG / X_ROWS;  // lanes that round a row of x
// Lanes that are sure to be in one subgroup, and that round one row of x.
const TOGETHER: u32 = select(4u, SUBGROUP, SUBGROUP > 4u && ROUNDERS % max(SUBGROUP, 1u) == 0u);
const SLOTS: u32 = WG / 4u;  // one for each lanes of a lane group that are sure to be in one subgroup

struct Params {
    tokens: u32,      // rows of x
    k: u32,           // multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // groups of scales per row
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,     // length of a row of out
    epilogue: u32,    // what becomes of the sums
    eps: f32,         // of the norm before the product
    queries: u32,     // rows of queries, for rope and the cache
    keys: u32,        // rows of keys, and as many of values
    width: u32,       // D
    rotary: u32,      // elements of a head that are rotated
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;      // [tokens, k / 4]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // [n, groups] as the format has them
@group(0) @binding(3) var<storage, read> bias: array<f32>;         // [n] if there is one
@group(0) @binding(4) var<uniform> params: Params;

var<workgroup> h_first: array<vec4<u32>, STAGED>;  // bytes h of inputs 0 … 15 of each block, row of x by row
var<workgroup> h_second: array<vec4<u32>, STAGED>; // of 16 … 31
var<workgroup> l_first: array<vec4<u32>, STAGED>;  // bytes l
var<workgroup> l_second: array<vec4<u32>, STAGED>;
var<workgroup> x_unit: array<vec3<f32>, STAGED>;
var<workgroup> squares: array<f32, WG / 4u>;        // Σ x² of what TOGETHER lanes rounded
var<workgroup> row_slots: array<vec4<f32>, SLOTS * X_ROWS>;  // sums of parts of lane groups, row of x by row

var<private> own_row: u32;

// The row of x that this lane rounds, or stores.
fn x_row() -> u32 {
    return own_row;
}

// Eight inputs of a quarter of a block, as they are and as they are multiplied.
struct Inputs {
    r0: vec4<f32>, r1: vec4<f32>,
    v0: vec4<f32>, v1: vec4<f32>,
}

// Quarter `lane % 4` of block `block`; of the first block where it is not there.
fn quarter_at(block: u32, there: bool, lane: u32) -> Inputs {
    let i = select(0u, block * 8u + lane % 4u * 2u, there);
    let r0 = input_at(i);
    let r1 = input_at(i + 1u);
    return Inputs(r0, r1, weighted(i, r0), weighted(i + 1u, r1));
}

// Round a quarter of a block into slot `at`. What is not there is computed and not stored. Returns Σ x².
fn stage_quarter(given: Inputs, at: u32, there: bool, lane: u32) -> f32 {
    let quarter = lane % 4u;
    let rounded = round_quarter(given.v0, given.v1, quarter);
    if (there) {
        if (quarter == 0u) {
            h_first[at] = rounded.bytes;
            x_unit[at] = rounded.unit;
        } else if (quarter == 1u) {
            l_first[at] = rounded.bytes;
        } else if (quarter == 2u) {
            h_second[at] = rounded.bytes;
        } else {
            l_second[at] = rounded.bytes;
        }
        return dot(given.r0, given.r0) + dot(given.r1, given.r1);
    }
    return 0.0;
}

// The products of blocks of weights with a staged block of row `i` of x, or zeros.
fn products(w: Loaded, i: u32, at: u32, there: bool) -> vec4<f32> {
    let slot = i * STAGE + at;
    let v = Sixteen(h_first[slot], l_first[slot]);
    let u = Sixteen(h_second[slot], l_second[slot]);
    let unit = x_unit[slot];
    var found = vec4<f32>(int16_dot(w.a, v, u, unit), 0.0, 0.0, 0.0);
    if (ROWS > 1u) {
        found.y = int16_dot(w.b, v, u, unit);
    }
    if (ROWS > 2u) {
        found.z = int16_dot(w.c, v, u, unit);
        found.w = int16_dot(w.d, v, u, unit);
    }
    return select(vec4<f32>(), found, there);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    // By the rows that there are, not those of the bucket: workgroups without work come last.
    let tokens = row_count();
    let tiles_m = (tokens + X_ROWS - 1u) / X_ROWS;
    let task = group.x + group.y * groups.x;
    // Those that share weights are neighbours: they run at the same time and find them in the cache.
    let m0 = task % tiles_m * X_ROWS;
    let cut = task / tiles_m;  // of the rows of the weight
    let first = (cut * (WG / LANES_PER_ROW) + lane / LANES_PER_ROW) * ROWS;
    if (cut * (WG / LANES_PER_ROW * ROWS) >= params.n) {
        return;
    }
    let size = subgroup_lanes();  // lanes of a subgroup
    let own = lane % LANES_PER_ROW;
    let last = params.n - 1u;  // rows past the end are computed as the last one and never stored
    let rows = min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(last));
    let blocks = params.k / 32u;
    var next = load_rows(rows, own, blocks);
    let stored_row = m0 + own % X_ROWS;
    let stores = own < X_ROWS && stored_row < tokens;
    own_row = min(stored_row, tokens - 1u);
    begin(first);
    let rounded_row = lane / ROUNDERS;  // of the tile
    let rounder = lane % ROUNDERS;
    var acc: array<vec4<f32>, X_ROWS>;  // registers
    var square = 0.0;
    for (var first_block = 0u; first_block < blocks; first_block = first_block + STAGE) {
        let end = min(first_block + STAGE, blocks);
        if (first_block > 0u) {
            workgroupBarrier();  // the stage before has been read
        }
        own_row = min(m0 + rounded_row, tokens - 1u);
        // Twice as many as there are lanes for, where there are more: all are asked for before the first are rounded.
        for (var base = first_block; base < end; base = base + ROUNDERS / 2u) {
            let block = base + rounder / 4u;
            let other = block + ROUNDERS / 4u;
            let slot = rounded_row * STAGE - first_block;
            let now = quarter_at(block, block < end, lane);
            var later = now;
            if (base + ROUNDERS / 4u < end) {
                later = quarter_at(other, other < end, lane);
            }
            square = square + stage_quarter(now, slot + block, block < end, lane);
            if (base + ROUNDERS / 4u < end) {
                square = square + stage_quarter(later, slot + other, other < end, lane);
            }
        }
        workgroupBarrier();
        for (var base = first_block; base < end; base = base + LANES_PER_ROW) {
            let block = base + own;
            let now = next;
            next = load_rows(rows, block + LANES_PER_ROW, blocks);
            let there = block < end;
            let at = select(0u, block - first_block, there);
            for (var i = 0u; i < X_ROWS; i = i + 1u) {  // unrolled
                acc[i] = acc[i] + products(now, i, at, there);
            }
        }
    }
    for (var i = 0u; i < X_ROWS; i = i + 1u) {  // unrolled
        acc[i] = aligned_sums(acc[i], size);
    }
    if (NORM) {
        for (var offset = 1u; offset < TOGETHER; offset = offset * 2u) {
            square = square + subgroupShuffleXor(square, offset);
        }
        if (lane % TOGETHER == 0u) {
            squares[lane / TOGETHER] = square;
        }
    }
    let width = min(size, LANES_PER_ROW);
    if (!IN_SUBGROUP && lane % width == 0u) {
        for (var i = 0u; i < X_ROWS; i = i + 1u) {  // unrolled
            row_slots[i * SLOTS + lane / width] = acc[i];
        }
    }
    if (NORM || !IN_SUBGROUP) {
        workgroupBarrier();
    }
    if (!stores) {
        return;
    }
    var sums = vec4<f32>();
    for (var i = 0u; i < X_ROWS; i = i + 1u) {  // unrolled
        sums = select(sums, acc[i], own == i);
    }
    if (!IN_SUBGROUP) {
        sums = vec4<f32>();
        let slots = LANES_PER_ROW / width;
        for (var i = 0u; i < slots; i = i + 1u) {
            sums = sums + row_slots[own * SLOTS + lane / LANES_PER_ROW * slots + i];
        }
    }
    if (NORM) {
        var total = 0.0;
        for (var i = 0u; i < ROUNDERS / TOGETHER; i = i + 1u) {
            total = total + squares[own * (ROUNDERS / TOGETHER) + i];
        }
        sums = sums * factor(total);
    }
    own_row = stored_row;
    store_rows(first, sums);
}
