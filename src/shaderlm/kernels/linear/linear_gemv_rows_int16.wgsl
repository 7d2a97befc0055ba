// out[tokens, n] = epilogue(Σ_k x[tokens, k] · w[n, k])        x rounded to 16 bits before, by round_rows_int16
// For a few rows of x: weights stream through registers, and a block of them serves X_ROWS rows of x (2 or 4). WG threads
// make WG / LANES_PER_ROW lane groups; a lane group computes X_ROWS × ROWS results (1, 2 or 4 rows of the weight), its lanes
// share k in blocks of 32. Inputs come from the cache: staged in workgroup memory, they took longer (H200). Weights are
// loaded one block ahead. Format of the weights (load_block), its int16_dot and the epilogue are included. Where the
// epilogue takes rows in pairs, ROWS is even. Edge lane groups clamp their rows and never store.
// Grid: ceil(tokens / X_ROWS) · ceil(n / (ROWS · WG / LANES_PER_ROW)) workgroups, folded.
// Needs: k % 32 == 0; LANES_PER_ROW lanes within a subgroup, consecutive.

const WG: u32 = 128u;
const LANES_PER_ROW: u32 = 8u;
const ROWS: u32 = 4u;
const X_ROWS: u32 = 4u;

struct Params {
    tokens: u32,
    k: u32,           // multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // groups of scales per row
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,     // length of a row of out
    epilogue: u32,    // what becomes of the sums
}

@group(0) @binding(0) var<storage, read> bytes: array<vec4<u32>>;  // [tokens, 4, k / 32], as round_rows_int16 writes them
@group(0) @binding(1) var<storage, read> units: array<vec4<f32>>;  // [tokens, k / 32]
@group(0) @binding(2) var<storage, read> weight: array<vec4<u32>>; // [n, …] as the included format lays it out
@group(0) @binding(3) var<storage, read> scales: array<u32>;       // [n, groups] as the format has them
@group(0) @binding(4) var<storage, read> bias: array<f32>;         // [n] if there is one
@group(0) @binding(5) var<uniform> params: Params;

// The same block of ROWS rows.
struct Weights {
    a: Packed, b: Packed, c: Packed, d: Packed,
}

fn load_weights(rows: vec4<u32>, block: u32) -> Weights {
    var found: Weights;
    found.a = load_block(rows.x, block);
    if (ROWS > 1u) {
        found.b = load_block(rows.y, block);
    }
    if (ROWS > 2u) {
        found.c = load_block(rows.z, block);
        found.d = load_block(rows.w, block);
    }
    return found;
}

// Their products with a block of a row of x, or with zeros.
fn products(w: Weights, row: u32, block: u32, there: bool) -> vec4<f32> {
    let blocks = params.k / 32u;
    let at = row * 4u * blocks + block;
    let first = Sixteen(bytes[at], bytes[at + blocks]);
    let second = Sixteen(bytes[at + 2u * blocks], bytes[at + 3u * blocks]);
    let unit = select(vec3<f32>(), units[row * blocks + block].xyz, there);
    var found = vec4<f32>(int16_dot(w.a, first, second, unit), 0.0, 0.0, 0.0);
    if (ROWS > 1u) {
        found.y = int16_dot(w.b, first, second, unit);
    }
    if (ROWS > 2u) {
        found.z = int16_dot(w.c, first, second, unit);
        found.w = int16_dot(w.d, first, second, unit);
    }
    return found;
}

// Adds up over a lane group; lane i % LANES_PER_ROW of it stores row i of x, so that not all wait for one. All lanes are
// here.
fn store_sums(i: u32, m0: u32, n: u32, value: vec4<f32>, own: u32) {
    var sums = value;
    for (var offset = 1u; offset < LANES_PER_ROW; offset = offset * 2u) {
        sums.x = sums.x + subgroupShuffleXor(sums.x, offset);
        if (ROWS > 1u) {
            sums.y = sums.y + subgroupShuffleXor(sums.y, offset);
        }
        if (ROWS > 2u) {
            sums.z = sums.z + subgroupShuffleXor(sums.z, offset);
            sums.w = sums.w + subgroupShuffleXor(sums.w, offset);
        }
    }
    if (own != i % LANES_PER_ROW) {
        return;
    }
    if (ROWS == 1u) {
        store(m0 + i, n, sums.x);
        return;
    }
    store_pair(m0 + i, n, sums.x, sums.y);
    if (ROWS > 2u) {
        store_pair(m0 + i, n + 2u, sums.z, sums.w);
    }
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
    let n_group = task / tiles_m * (ROWS * WG / LANES_PER_ROW);
    if (n_group >= params.n) {
        return;
    }
    let n0 = n_group + lane / LANES_PER_ROW * ROWS;
    let rows = min(vec4<u32>(n0, n0 + 1u, n0 + 2u, n0 + 3u), vec4<u32>(params.n - 1u));
    let x_rows = min(vec4<u32>(m0, m0 + 1u, m0 + 2u, m0 + 3u), vec4<u32>(tokens - 1u));
    let blocks = params.k / 32u;
    let own = lane % LANES_PER_ROW;
    var acc0 = vec4<f32>();
    var acc1 = vec4<f32>();
    var acc2 = vec4<f32>();
    var acc3 = vec4<f32>();
    // A load past the end repeats the last block and is not used.
    var ahead = load_weights(rows, min(own, blocks - 1u));
    for (var base = 0u; base < blocks; base = base + LANES_PER_ROW) {
        let there = base + own < blocks;
        let block = min(base + own, blocks - 1u);
        let w = ahead;
        ahead = load_weights(rows, min(base + LANES_PER_ROW + own, blocks - 1u));
        acc0 = acc0 + products(w, x_rows.x, block, there);
        acc1 = acc1 + products(w, x_rows.y, block, there);
        if (X_ROWS > 2u) {
            acc2 = acc2 + products(w, x_rows.z, block, there);
            acc3 = acc3 + products(w, x_rows.w, block, there);
        }
    }
    store_sums(0u, m0, n0, acc0, own);
    store_sums(1u, m0, n0, acc1, own);
    if (X_ROWS > 2u) {
        store_sums(2u, m0, n0, acc2, own);
        store_sums(3u, m0, n0, acc3, own);
    }
}
