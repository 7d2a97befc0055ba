// out[0, n] = epilogue(Σ_k prologue(x)[0, k] · w[n, k])        m = 1; format of the weights, prologue and epilogue are included
// WG threads make WG / LANES_PER_ROW lane groups; a lane group computes ROWS rows (1, 2 or 4), its lanes share
// their k in blocks of 32: a block of x serves all rows, a block of q4 weights is one 16-byte load. x is staged in workgroup
// memory, STAGE blocks at a time: read straight from the buffer, the lanes' blocks lie 128 bytes apart, and each load
// touches as many cache lines as there are lanes. What is staged, and how it is multiplied, is the included
// arithmetic's business. Weights are loaded one block ahead: before the first wait for x, and before the arithmetic
// of the block at hand.
// Grid: ceil(n / (ROWS · WG / LANES_PER_ROW)) workgroups, folded. Needs k % 32 == 0 and STAGE % LANES_PER_ROW == 0.

const WG: u32 = 256u;
const LANES_PER_ROW: u32 = 64u;
const ROWS: u32 = 4u;
const STORED: u32 = ROWS;  // rows that a lane stores
const STAGE: u32 = 64u;

struct Params {
    tokens: u32,
    k: u32,           // multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // groups of scales per row
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,     // length of a row of out
    epilogue: u32,    // what becomes of the sums
    eps: f32,         // of the norm before the product
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;      // [tokens, k / 4]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // [n, groups] as the format has them
@group(0) @binding(3) var<storage, read> bias: array<f32>;         // [n] if there is one
@group(0) @binding(4) var<uniform> params: Params;

// A block takes nine quads, an odd number, so that lanes that read neighbouring blocks hit different banks.
var<workgroup> x_tile: array<vec4<u32>, STAGE * 9u>;

fn x_row() -> u32 {
    return 0u;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let first = ((group.x + group.y * groups.x) * (WG / LANES_PER_ROW) + lane / LANES_PER_ROW) * ROWS;
    let last = params.n - 1u;  // rows past the end are computed as the last one and never stored
    let rows = min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(last));
    let blocks = params.k / 32u;
    var acc = vec4<f32>();
    var squares = 0.0;
    var block = lane % LANES_PER_ROW;
    let last_block = blocks - 1u;
    // A load past the end repeats the last block and is not used.
    var w0 = load_block(rows.x, min(block, last_block));
    var w1 = w0;
    var w2 = w0;
    var w3 = w0;
    if (ROWS > 1u) {
        w1 = load_block(rows.y, min(block, last_block));
    }
    if (ROWS > 2u) {
        w2 = load_block(rows.z, min(block, last_block));
        w3 = load_block(rows.w, min(block, last_block));
    }
    begin(first);
    for (var first_block = 0u; first_block < blocks; first_block = first_block + STAGE) {
        let end = min(first_block + STAGE, blocks);
        workgroupBarrier();  // the stage before has been read
        for (var i = lane; i < (end - first_block) * 8u; i = i + WG) {
            let inputs = x[first_block * 8u + i];
            if (NORM) {
                squares = squares + dot(inputs, inputs);
            }
            x_tile[i / 8u * 9u + i % 8u] = bitcast<vec4<u32>>(weighted(first_block * 8u + i, inputs));
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
            let ahead = min(block + LANES_PER_ROW, last_block);
            w0 = load_block(rows.x, ahead);
            if (ROWS > 1u) {
                w1 = load_block(rows.y, ahead);
            }
            if (ROWS > 2u) {
                w2 = load_block(rows.z, ahead);
                w3 = load_block(rows.w, ahead);
            }
            let v = staged((block - first_block) * 9u);
            acc.x = acc.x + staged_dot(p0, v);
            if (ROWS > 1u) {
                acc.y = acc.y + staged_dot(p1, v);
            }
            if (ROWS > 2u) {
                acc.z = acc.z + staged_dot(p2, v);
                acc.w = acc.w + staged_dot(p3, v);
            }
        }
    }
    acc = row_sum(rooted(acc, squares, lane), lane);
    if (lane % LANES_PER_ROW == 0u) {
        store_rows(first, acc);
    }
}
