// out[m, n] = epilogue(Σ_k q(prologue(x))[m, k] · w[n, k])        q rounds to 16 bits with one scale per block of 32
// A workgroup has one row of x. Of several rows, those that read the same weights are neighbours, and find them in the cache.
// Inputs of 16 bits are two signed bytes each (shared/int16). WG threads make WG / LANES_PER_ROW lane groups; a lane
// group computes ROWS rows of the weight (1, 2 or 4), its lanes share their k in blocks of 32. Lanes that are too few for a
// lane group repeat blocks of the last one and store nothing. Every workgroup rounds x for itself, STAGE blocks at a time,
// four lanes to a block, into workgroup memory: that takes less than a dispatch of its own, and the first weights are loaded
// meanwhile. Products are dot products of bytes, exact, four at a time. A block is rounded with one unit, to at most
// 1/65,024 of its largest input, and has (unit, unit · Σ of the first 16, the same of the others) beside it, the sums for
// formats with a zero point or a minimum. All loops run equally often for all lanes: subgroup functions follow them.
// Inputs, prologue, epilogue, format of the weights (load_block) and its int16_dot are included.
// Grid: tokens · ceil(n / (ROWS · (WG / LANES_PER_ROW))) workgroups, folded. Needs: k % 32 == 0; subgroups of four lanes or more, of
// consecutive lanes; STAGE a multiple of LANES_PER_ROW, or all blocks; even n and ROWS > 1 where the epilogue takes rows in
// pairs.

const WG: u32 = 256u;
const LANES_PER_ROW: u32 = 32u;
const ROWS: u32 = 4u;
const STAGE: u32 = 64u;
const SEVERAL: bool = false;  // rows of x
// Blocks of a row that each lane has, 1 or 2: all of them are loaded while the inputs are rounded. 0: any number, one ahead.
const ROUNDS: u32 = 0u;
// Rows that a lane stores: two of four, where several lanes have the sums.
const STORED: u32 = select(ROWS, 2u, ADDERS > 1u && ROWS > 2u);
const SLOTS: u32 = WG / 4u;  // WG where LANES_PER_ROW is no multiple of 4

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

var<workgroup> h_first: array<vec4<u32>, STAGE>;  // bytes h of inputs 0 … 15 of each block
var<workgroup> h_second: array<vec4<u32>, STAGE>; // of 16 … 31
var<workgroup> l_first: array<vec4<u32>, STAGE>;  // bytes l
var<workgroup> l_second: array<vec4<u32>, STAGE>;
var<workgroup> x_unit: array<vec3<f32>, STAGE>;
var<workgroup> squares: array<f32, WG / 4u>;     // Σ x² of what each subgroup rounded
var<workgroup> row_slots: array<vec4<f32>, SLOTS>;  // see shared/row_sums

var<private> workgroup_row: u32;

// The row of x that this workgroup has.
fn x_row() -> u32 {
    return select(0u, workgroup_row, SEVERAL);
}

// Eight inputs of a quarter of a block, as they are and as they are multiplied.
struct Inputs {
    quad: u32,
    r0: vec4<f32>, r1: vec4<f32>,
    v0: vec4<f32>, v1: vec4<f32>,
}

// Quarter `lane % 4` of block `block`; of the first block where it is not there.
fn quarter_at(block: u32, there: bool, lane: u32) -> Inputs {
    let i = select(0u, block * 8u + lane % 4u * 2u, there);
    let r0 = input_at(i);
    let r1 = input_at(i + 1u);
    return Inputs(i, r0, r1, weighted(i, r0), weighted(i + 1u, r1));
}

// Round a quarter of a block into slot `at`. What is not there is computed and not stored. Returns Σ x².
fn stage_quarter(given: Inputs, at: u32, there: bool, lane: u32) -> f32 {
    let quarter = lane % 4u;
    let rounded = round_quarter(given.v0, given.v1, quarter);
    if (there) {
        if (quarter == 0u) {
            h_first[at] = rounded.bytes;
        } else if (quarter == 1u) {
            l_first[at] = rounded.bytes;
        } else if (quarter == 2u) {
            h_second[at] = rounded.bytes;
        } else {
            l_second[at] = rounded.bytes;
        }
        if (quarter == 0u) {
            x_unit[at] = rounded.unit;
        }
        keep_input(given.quad, given.r0);
        keep_input(given.quad + 1u, given.r1);
        return dot(given.r0, given.r0) + dot(given.r1, given.r1);
    }
    return 0.0;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let task = group.x + group.y * groups.x;
    var cut = task;  // of the rows of the weight
    if (SEVERAL) {
        // By the rows that there are, not those of the bucket: workgroups without work come last.
        let tokens = row_count();
        workgroup_row = task % tokens;
        cut = task / tokens;
        if (cut * (WG / LANES_PER_ROW * ROWS) >= params.n) {
            return;
        }
    }
    let size = subgroup_lanes();  // lanes of a subgroup
    let lane_group = min(lane / LANES_PER_ROW, WG / LANES_PER_ROW - 1u);
    let first = (cut * (WG / LANES_PER_ROW) + lane_group) * ROWS;
    let last = params.n - 1u;  // rows past the end are computed as the last one and never stored
    let rows = min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(last));
    let blocks = params.k / 32u;
    var acc = vec4<f32>();
    var square = 0.0;
    var next = load_rows(rows, lane % LANES_PER_ROW, blocks);
    var second = next;
    if (ROUNDS == 2u) {
        second = load_rows(rows, lane % LANES_PER_ROW + LANES_PER_ROW, blocks);
    }
    let nth = lane % STRIDE % (ROWS / STORED);  // of the lanes that store the rows of a lane group
    let stored = (cut * (WG / LANES_PER_ROW) + lane_group_of_sums(lane)) * ROWS + nth * STORED;
    begin(stored);
    begin_inputs(lane, size, cut);
    for (var first_block = 0u; first_block < blocks; first_block = first_block + STAGE) {
        let end = min(first_block + STAGE, blocks);
        if (first_block > 0u) {
            workgroupBarrier();  // the stage before has been read
        }
        // Twice as many as there are lanes for, where there are more: all are asked for before the first are rounded.
        for (var base = first_block; base < end; base = base + WG / 2u) {
            let block = base + lane / 4u;
            let other = block + WG / 4u;
            let now = quarter_at(block, block < end, lane);
            var later = now;
            if (base + WG / 4u < end) {
                later = quarter_at(other, other < end, lane);
            }
            square = square + stage_quarter(now, block - first_block, block < end, lane);
            if (base + WG / 4u < end) {
                square = square + stage_quarter(later, other - first_block, other < end, lane);
            }
        }
        workgroupBarrier();
        for (var base = first_block; base < end; base = base + LANES_PER_ROW) {
            let block = base + lane % LANES_PER_ROW;
            let now = next;
            if (ROUNDS > 0u) {
                next = second;
            } else {
                // Also in the last round: under a condition, a loop over 4096 × 28672 took 29 µs instead of 24 (H200).
                next = load_rows(rows, block + LANES_PER_ROW, blocks);
            }
            let there = ROUNDS > 0u || block < blocks;
            let at = select(0u, block - first_block, there);
            let v = Sixteen(h_first[at], l_first[at]);
            let u = Sixteen(h_second[at], l_second[at]);
            let unit = x_unit[at];
            acc.x = acc.x + select(0.0, int16_dot(now.a, v, u, unit), there);
            if (ROWS > 1u) {
                acc.y = acc.y + select(0.0, int16_dot(now.b, v, u, unit), there);
            }
            if (ROWS > 2u) {
                acc.z = acc.z + select(0.0, int16_dot(now.c, v, u, unit), there);
                acc.w = acc.w + select(0.0, int16_dot(now.d, v, u, unit), there);
            }
        }
    }
    if (NORM) {
        let part = subgroupAdd(square);
        if (lane % size == 0u) {
            squares[lane / size] = part;
        }
    }
    if (IN_SUBGROUP && !NORM) {
        acc = aligned_sums(acc, size);
    } else {
        acc = row_sums(acc, lane, size);  // its barrier also is that of `squares`
    }
    if (has_sums(lane, ROWS / STORED)) {
        if (NORM) {
            var total = 0.0;
            for (var i = 0u; i < WG / size; i = i + 1u) {
                total = total + squares[i];
            }
            acc = acc * factor(total);
        }
        store_rows(stored, select(acc, acc.zwzw, nth == 1u));
    }
    finish_rows(cut, lane);
}
