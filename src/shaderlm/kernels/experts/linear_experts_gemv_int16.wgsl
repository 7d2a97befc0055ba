// y[t, j, n] = bias + Σ_k q(x)[t, k] · w[ids[t, j] · n_rows + n, k], apply(even n, odd n) of it, or, if SUM,
// out[t, n] = residual + Σ_j factors[t, j] · (bias + Σ_k q(x)[t, j, k] · w[ids[t, j] · n_rows + n, k])
// q rounds to 16 bits with one scale per block of 32, of x as the included prologue gives it (without SUM). As
// linear_gemv_int16, for few rows and the matrices of their experts: a lane group computes ROWS columns (1, 2 or 4) of one
// row and one of its experts; with SUM it takes all experts of the row, whose inputs lie one after the other, as one long
// row of blocks. A factor belongs to the unit of a block. What becomes of the sums is in experts/choices.
// All loops run equally often for all lanes: subgroup functions follow them.
// Grid: ceil(n / (ROWS · (WG / LANES_PER_ROW))) workgroups for each row and expert, or for each row with SUM; folded.
// Needs: k % 32 == 0; subgroups of four lanes or more, of consecutive lanes; STAGE a multiple of LANES_PER_ROW, or all
// blocks; ROWS > 1 where columns are taken in pairs.

const WG: u32 = 256u;
const LANES_PER_ROW: u32 = 32u;
const ROWS: u32 = 4u;
const STAGE: u32 = 64u;
const SLOTS: u32 = WG / 4u;  // WG where LANES_PER_ROW is no multiple of 4

struct Params {
    tokens: u32,
    k: u32,           // multiple of 32
    n: u32,           // rows of the matrix of one expert
    groups: u32,      // groups of scales per row
    experts: u32,
    used: u32,
    combine: u32,     // what becomes of the sums
    eps: f32,         // of the norm before the product
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;      // [tokens, k / 4], or [tokens, used, k / 4]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [experts · n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // [experts · n, groups] as the format has them
@group(0) @binding(3) var<uniform> params: Params;

var<workgroup> h_first: array<vec4<u32>, STAGE>;  // bytes h of inputs 0 … 15 of each block
var<workgroup> h_second: array<vec4<u32>, STAGE>; // of 16 … 31
var<workgroup> l_first: array<vec4<u32>, STAGE>;  // bytes l
var<workgroup> l_second: array<vec4<u32>, STAGE>;
var<workgroup> x_unit: array<vec3<f32>, STAGE>;
var<workgroup> row_slots: array<vec4<f32>, SLOTS>;  // see shared/row_sums

// Round eight values, quarter `lane % 4` of the block that starts at quad `first`, into slot `at`. A block that is not there
// is computed and not stored. `quad` is where the block starts in a row of the norm's weights. Returns Σ x².
fn stage_quarter(first: u32, quad: u32, at: u32, there: bool, scale: f32, lane: u32) -> f32 {
    let quarter = lane % 4u;
    let r0 = x[first + quarter * 2u];
    let r1 = x[first + quarter * 2u + 1u];
    let v0 = weighted(quad + quarter * 2u, r0);
    let v1 = weighted(quad + quarter * 2u + 1u, r1);
    let rounded = round_quarter(v0, v1, quarter);
    if (there) {
        if (quarter == 0u) {
            h_first[at] = rounded.bytes;
            x_unit[at] = scale * rounded.unit;
        } else if (quarter == 1u) {
            l_first[at] = rounded.bytes;
        } else if (quarter == 2u) {
            h_second[at] = rounded.bytes;
        } else {
            l_second[at] = rounded.bytes;
        }
        return dot(r0, r0) + dot(r1, r1);
    }
    return 0.0;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let size = subgroup_lanes();  // lanes of a subgroup
    let per_group = ROWS * (WG / LANES_PER_ROW);
    let tiles = (params.n + per_group - 1u) / per_group;
    let at = (group.x + group.y * groups.x) / tiles;  // the row of out: a row and an expert, or a row
    let tile = (group.x + group.y * groups.x) % tiles;
    var each = params.used;
    var span = 1u;  // experts of a lane group
    if (has(SUM)) {
        each = 1u;
        span = params.used;
    }
    let row = at / each;
    if (row >= row_count()) {
        return;
    }
    let first = tile * per_group + min(lane / LANES_PER_ROW, WG / LANES_PER_ROW - 1u) * ROWS;
    let last = params.n - 1u;  // columns past the end are computed as the last one and never stored
    let columns = min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(last));
    let blocks_each = params.k / 32u;
    let blocks = blocks_each * span;
    let choice = at * span;  // the first of the lane group
    let inputs = row * blocks * 8u;
    var acc = vec4<f32>();
    var squares = 0.0;
    // A load past the end repeats the last block and is not used.
    var ahead = min(lane % LANES_PER_ROW, blocks - 1u);
    var rows = columns + vec4<u32>(matrix(choice + ahead / blocks_each));
    var w0 = load_block(rows.x, ahead % blocks_each);
    var w1 = w0;
    var w2 = w0;
    var w3 = w0;
    if (ROWS > 1u) {
        w1 = load_block(rows.y, ahead % blocks_each);
    }
    if (ROWS > 2u) {
        w2 = load_block(rows.z, ahead % blocks_each);
        w3 = load_block(rows.w, ahead % blocks_each);
    }
    for (var first_block = 0u; first_block < blocks; first_block = first_block + STAGE) {
        let end = min(first_block + STAGE, blocks);
        if (first_block > 0u) {
            workgroupBarrier();  // the stage before has been read
        }
        for (var base = first_block; base < end; base = base + WG / 4u) {
            let block = base + lane / 4u;
            let there = block < end;
            let source = select(first_block, block, there);
            let scale = share(choice + source / blocks_each);
            squares = squares + stage_quarter(inputs + source * 8u, source * 8u, source - first_block, there, scale, lane);
        }
        workgroupBarrier();
        for (var base = first_block; base < end; base = base + LANES_PER_ROW) {
            let block = base + lane % LANES_PER_ROW;
            let p0 = w0;
            let p1 = w1;
            let p2 = w2;
            let p3 = w3;
            ahead = min(block + LANES_PER_ROW, blocks - 1u);
            rows = columns + vec4<u32>(matrix(choice + ahead / blocks_each));
            w0 = load_block(rows.x, ahead % blocks_each);
            if (ROWS > 1u) {
                w1 = load_block(rows.y, ahead % blocks_each);
            }
            if (ROWS > 2u) {
                w2 = load_block(rows.z, ahead % blocks_each);
                w3 = load_block(rows.w, ahead % blocks_each);
            }
            let there = block < blocks;
            let slot = select(0u, block - first_block, there);
            let v = Sixteen(h_first[slot], l_first[slot]);
            let u = Sixteen(h_second[slot], l_second[slot]);
            let unit = x_unit[slot];
            acc.x = acc.x + select(0.0, int16_dot(p0, v, u, unit), there);
            if (ROWS > 1u) {
                acc.y = acc.y + select(0.0, int16_dot(p1, v, u, unit), there);
            }
            if (ROWS > 2u) {
                acc.z = acc.z + select(0.0, int16_dot(p2, v, u, unit), there);
                acc.w = acc.w + select(0.0, int16_dot(p3, v, u, unit), there);
            }
        }
    }
    acc = rooted(acc, squares, lane);
    acc = row_sums(acc + biases(choice, span, lane % LANES_PER_ROW, LANES_PER_ROW, columns), lane, size);
    if (has_sums(lane, 1u)) {
        let stored = tile * per_group + lane_group_of_sums(lane) * ROWS;
        if (ROWS == 1u) {
            store(at, stored, acc.x);
        } else {
            store_pair(at, stored, acc.x, acc.y);
        }
        if (ROWS > 2u) {
            store_pair(at, stored + 2u, acc.z, acc.w);
        }
    }
}
