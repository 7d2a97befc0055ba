// y[c, n] = Σ_k x[row of c, k] · w[e · n_rows + n, k] for the choices c of expert e, with x[c] if SUM
// The format of w and what becomes of the sums (store_choice) are included.
// A workgroup of 16 × 16 threads computes TILE choices of one expert × 64 columns; each step stages QUADS · 4 of k of both
// operands in workgroup memory. A thread owns 2 × 4 results, 16 apart; where columns are taken in pairs (GATED), two
// neighbours, and the two 32 further on. Edge threads clamp their choice and never store.
// Grid: one workgroup per tile of the list and 64 columns, folded. Needs k % 32 == 0.

const WG: u32 = 256u;
const TILE: u32 = 32u;
const QUADS: u32 = 8u;
const BN: u32 = 64u;
const STRIDE: u32 = QUADS + 1u;  // one more than needed: rows then start in different banks
const NONE: u32 = 0xFFFFFFFFu;

struct Params {
    k: u32,           // multiple of 32
    n: u32,           // rows of the matrix of one expert
    groups: u32,      // groups of scales per row
    used: u32,
    tiles: u32,       // of the list
    combine: u32,     // what becomes of the sums
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;      // [tokens, k / 4], or [tokens, used, k / 4]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [experts · n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // [experts · n, groups] as the format has them
@group(0) @binding(3) var<storage, read> order: array<u32>;        // choices, expert by expert
@group(0) @binding(4) var<storage, read> tiles: array<vec4<u32>>;  // expert, first of order, end
@group(0) @binding(5) var<uniform> params: Params;

var<workgroup> a_tile: array<vec4<f32>, TILE * STRIDE>;
var<workgroup> b_tile: array<vec4<f32>, BN * STRIDE>;

// Where column n of the tile is staged: thread tx works on slots tx + 16 · (0 … 3).
fn slot(n: u32) -> u32 {
    if (has(GATED)) {
        return n % 32u / 2u + 16u * (n % 2u) + n / 32u * 32u;
    }
    return n;
}

fn store_row(at: u32, tile: vec4<u32>, n0: u32, tx: u32, sums: vec4<f32>) {
    if (at >= tile.z) {
        return;
    }
    // The columns of a thread; neighbours, and those 32 further on, where they are taken in pairs.
    var columns = n0 + tx + vec4<u32>(0u, 16u, 32u, 48u);
    if (has(GATED)) {
        columns = n0 + 2u * tx + vec4<u32>(0u, 1u, 32u, 33u);
    }
    store_choice(order[at], tile.x, columns, sums);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    // Tiles that share weights are neighbours: they run at the same time and find them in the cache.
    let index = group.x + group.y * groups.x;
    let n0 = index / params.tiles * BN;
    let tile = tiles[index % params.tiles];
    if (tile.x == NONE || n0 >= params.n) {
        return;
    }
    let tx = lane % 16u;
    let ty = lane / 16u;
    let k_quads = params.k / 4u;
    var each = params.used;  // choices that share a row of x
    if (has(SUM)) {
        each = 1u;
    }
    var acc0 = vec4<f32>();
    var acc1 = vec4<f32>();
    for (var q0 = 0u; q0 < k_quads; q0 = q0 + QUADS) {
        for (var i = lane; i < TILE * QUADS; i = i + WG) {
            let choice = order[min(tile.y + i / QUADS, tile.z - 1u)];
            a_tile[(i / QUADS) * STRIDE + i % QUADS] = x[choice / each * k_quads + q0 + i % QUADS];
        }
        for (var i = lane; i < BN * QUADS; i = i + WG) {
            let row = tile.x * params.n + min(n0 + i / QUADS, params.n - 1u);
            b_tile[slot(i / QUADS) * STRIDE + i % QUADS] = weight4(row, q0 + i % QUADS);
        }
        workgroupBarrier();
        for (var q = 0u; q < QUADS; q = q + 1u) {
            let w0 = b_tile[tx * STRIDE + q];
            let w1 = b_tile[(tx + 16u) * STRIDE + q];
            let w2 = b_tile[(tx + 32u) * STRIDE + q];
            let w3 = b_tile[(tx + 48u) * STRIDE + q];
            let a0 = a_tile[ty * STRIDE + q];
            let a1 = a_tile[(ty + 16u) * STRIDE + q];
            acc0 = acc0 + vec4<f32>(dot(a0, w0), dot(a0, w1), dot(a0, w2), dot(a0, w3));
            acc1 = acc1 + vec4<f32>(dot(a1, w0), dot(a1, w1), dot(a1, w2), dot(a1, w3));
        }
        workgroupBarrier();
    }
    store_row(tile.y + ty, tile, n0, tx, acc0);
    store_row(tile.y + ty + 16u, tile, n0, tx, acc1);
}
