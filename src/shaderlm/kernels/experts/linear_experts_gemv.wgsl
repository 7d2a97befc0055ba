// y[t, j, n] = bias + Σ_k x[t, k] · w[ids[t, j] · n_rows + n, k], apply(even n, odd n) of it, or, if SUM,
// out[t, n] = residual + Σ_j factors[t, j] · (bias + Σ_k x[t, j, k] · w[ids[t, j] · n_rows + n, k]); the format of w is included
// For few rows: nothing but the matrices of the chosen experts is read. WG threads make WG / LANES_PER_ROW lane
// groups; a lane group computes ROWS columns (1, 2 or 4) of one row and one of its experts, its lanes share their k in
// blocks of 32. With SUM a lane group takes all experts of the row: their inputs lie one after the other, as one long row of
// blocks. x is staged in workgroup memory, STAGE blocks at a time, and weights are loaded one block ahead, as in
// linear_gemv_staged. What becomes of the sums is in experts/choices.
// Grid: ceil(n / (ROWS · WG / LANES_PER_ROW)) workgroups for each row and expert, or for each row with SUM; folded.
// Needs k % 32 == 0 and STAGE % LANES_PER_ROW == 0.

const WG: u32 = 256u;
const LANES_PER_ROW: u32 = 64u;
const ROWS: u32 = 4u;
const STAGE: u32 = 64u;

struct Params {
    tokens: u32,
    k: u32,           // multiple of 32
    n: u32,           // rows of the matrix of one expert
    groups: u32,      // groups of scales per row
    experts: u32,
    used: u32,
    combine: u32,     // what becomes of the sums
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;      // [tokens, k / 4], or [tokens, used, k / 4]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [experts · n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // [experts · n, groups] as the format has them
@group(0) @binding(3) var<uniform> params: Params;

// A block takes nine quads, an odd number, so that lanes that read neighbouring blocks hit different banks.
var<workgroup> x_tile: array<vec4<u32>, STAGE * 9u>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
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
    let first = tile * per_group + lane / LANES_PER_ROW * ROWS;
    let last = params.n - 1u;  // columns past the end are computed as the last one and never stored
    let columns = min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(last));
    let blocks_each = params.k / 32u;
    let blocks = blocks_each * span;
    let last_block = blocks - 1u;
    let choice = at * span;  // the first of the lane group
    let inputs = row * blocks * 8u;
    var acc = vec4<f32>();
    var block = lane % LANES_PER_ROW;
    // A load past the end repeats the last block and is not used.
    var ahead = min(block, last_block);
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
        workgroupBarrier();  // the stage before has been read
        for (var i = lane; i < (end - first_block) * 8u; i = i + WG) {
            x_tile[i / 8u * 9u + i % 8u] = bitcast<vec4<u32>>(x[inputs + first_block * 8u + i]);
        }
        workgroupBarrier();
        if (FINISH) {
            for (var b = lane; b < end - first_block; b = b + WG) {
                finish_block(b * 9u);
            }
            workgroupBarrier();
        }
        for (; block < end; block = block + LANES_PER_ROW) {
            let p0 = w0;
            let p1 = w1;
            let p2 = w2;
            let p3 = w3;
            let scale = share(choice + block / blocks_each);
            ahead = min(block + LANES_PER_ROW, last_block);
            rows = columns + vec4<u32>(matrix(choice + ahead / blocks_each));
            w0 = load_block(rows.x, ahead % blocks_each);
            if (ROWS > 1u) {
                w1 = load_block(rows.y, ahead % blocks_each);
            }
            if (ROWS > 2u) {
                w2 = load_block(rows.z, ahead % blocks_each);
                w3 = load_block(rows.w, ahead % blocks_each);
            }
            let v = staged((block - first_block) * 9u);
            acc.x = acc.x + scale * staged_dot(p0, v);
            if (ROWS > 1u) {
                acc.y = acc.y + scale * staged_dot(p1, v);
            }
            if (ROWS > 2u) {
                acc.z = acc.z + scale * staged_dot(p2, v);
                acc.w = acc.w + scale * staged_dot(p3, v);
            }
        }
    }
    acc = row_sum(acc + biases(choice, span, lane % LANES_PER_ROW, LANES_PER_ROW, columns), lane);
    if (lane % LANES_PER_ROW == 0u) {
        if (ROWS == 1u) {
            store(at, first, acc.x);
        } else {
            store_pair(at, first, acc.x, acc.y);
        }
        if (ROWS > 2u) {
            store_pair(at, first + 2u, acc.z, acc.w);
        }
    }
}
