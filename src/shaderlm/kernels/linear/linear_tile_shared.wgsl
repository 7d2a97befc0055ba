// out[tokens, n] = epilogue(Σ_k x[tokens, k] · w[n, k])        format of the weights and epilogue are included
// A workgroup of 16 × 16 threads computes a tile of 16·TM rows × 16·TN columns; each step stages QUADS·4 of k for
// both operands in workgroup memory, weights dequantised once per tile. A thread owns TM (1, 2, 4 or 8) × TN (1, 2 or
// 4) results, 16 apart, so that neighbouring threads read neighbouring rows and write neighbouring columns. Where
// columns are taken in pairs (GATED), TN is 2 or 4, and a thread owns two neighbours, and the two 32 further on.
// Edge threads clamp their row and never store.
// Grid: one workgroup per tile, folded. Needs k % 32 == 0.

const WG: u32 = 256u;
const TM: u32 = 4u;
const TN: u32 = 4u;
const QUADS: u32 = 4u;

const BM: u32 = 16u * TM;
const BN: u32 = 16u * TN;
const STRIDE: u32 = QUADS + 1u;  // one more than needed: rows then start in different banks

struct Params {
    tokens: u32,
    k: u32,           // multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // groups of scales per row
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,     // length of a row of out
    epilogue: u32,    // what becomes of the sums
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;      // [tokens, k / 4]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // [n, groups] as the format has them
@group(0) @binding(3) var<storage, read> bias: array<f32>;         // [n] if there is one
@group(0) @binding(4) var<uniform> params: Params;

var<workgroup> a_tile: array<vec4<f32>, BM * STRIDE>;
var<workgroup> b_tile: array<vec4<f32>, BN * STRIDE>;

fn product(v: vec4<f32>, bx: vec4<f32>, by: vec4<f32>, bz: vec4<f32>, bw: vec4<f32>) -> vec4<f32> {
    return v.x * bx + v.y * by + v.z * bz + v.w * bw;
}

// Where row n of the tile's weights is staged: thread tx works on slots tx + 16 · (0 … 3).
fn slot(n: u32) -> u32 {
    if (has(GATED)) {
        return n % 32u / 2u + 16u * (n % 2u) + n / 32u * 32u;
    }
    return n;
}

fn store_row(m: u32, n0: u32, tx: u32, values: vec4<f32>) {
    if (has(GATED)) {
        store_pair(m, n0 + 2u * tx, values.x, values.y);
        if (TN > 2u) {
            store_pair(m, n0 + 2u * tx + 32u, values.z, values.w);
        }
    } else {
        store(m, n0 + tx, values.x);
        if (TN > 1u) {
            store(m, n0 + tx + 16u, values.y);
        }
        if (TN > 2u) {
            store(m, n0 + tx + 32u, values.z);
            store(m, n0 + tx + 48u, values.w);
        }
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    // By the rows that there are, not those of the bucket: workgroups without work come last.
    let rows = row_count();
    let tiles_m = (rows + BM - 1u) / BM;
    let tiles_n = (params.n + BN - 1u) / BN;
    let tile = group.x + group.y * groups.x;
    if (tile >= tiles_m * tiles_n) {
        return;
    }
    // Tiles that share weights are neighbours: they run at the same time and find them in the cache.
    let m0 = (tile % tiles_m) * BM;
    let n0 = (tile / tiles_m) * BN;
    let tx = lane % 16u;
    let ty = lane / 16u;
    let k_quads = params.k / 4u;
    var acc0 = vec4<f32>();
    var acc1 = vec4<f32>();
    var acc2 = vec4<f32>();
    var acc3 = vec4<f32>();
    var acc4 = vec4<f32>();
    var acc5 = vec4<f32>();
    var acc6 = vec4<f32>();
    var acc7 = vec4<f32>();
    for (var q0 = 0u; q0 < k_quads; q0 = q0 + QUADS) {
        for (var i = lane; i < BM * QUADS; i = i + WG) {
            let row = min(m0 + i / QUADS, rows - 1u);
            a_tile[(i / QUADS) * STRIDE + i % QUADS] = x[row * k_quads + q0 + i % QUADS];
        }
        for (var i = lane; i < BN * QUADS; i = i + WG) {
            let row = min(n0 + i / QUADS, params.n - 1u);
            b_tile[slot(i / QUADS) * STRIDE + i % QUADS] = weight4(row, q0 + i % QUADS);
        }
        workgroupBarrier();
        for (var q = 0u; q < QUADS; q = q + 1u) {
            let w0 = b_tile[(tx + 0u) * STRIDE + q];
            var w1 = vec4<f32>();
            var w2 = vec4<f32>();
            var w3 = vec4<f32>();
            if (TN > 1u) {
                w1 = b_tile[(tx + 16u) * STRIDE + q];
            }
            if (TN > 2u) {
                w2 = b_tile[(tx + 32u) * STRIDE + q];
                w3 = b_tile[(tx + 48u) * STRIDE + q];
            }
            let bx = vec4<f32>(w0.x, w1.x, w2.x, w3.x);
            let by = vec4<f32>(w0.y, w1.y, w2.y, w3.y);
            let bz = vec4<f32>(w0.z, w1.z, w2.z, w3.z);
            let bw = vec4<f32>(w0.w, w1.w, w2.w, w3.w);
            acc0 = acc0 + product(a_tile[(ty + 0u) * STRIDE + q], bx, by, bz, bw);
            if (TM > 1u) {
                acc1 = acc1 + product(a_tile[(ty + 16u) * STRIDE + q], bx, by, bz, bw);
            }
            if (TM > 2u) {
                acc2 = acc2 + product(a_tile[(ty + 32u) * STRIDE + q], bx, by, bz, bw);
                acc3 = acc3 + product(a_tile[(ty + 48u) * STRIDE + q], bx, by, bz, bw);
            }
            if (TM > 4u) {
                acc4 = acc4 + product(a_tile[(ty + 64u) * STRIDE + q], bx, by, bz, bw);
                acc5 = acc5 + product(a_tile[(ty + 80u) * STRIDE + q], bx, by, bz, bw);
                acc6 = acc6 + product(a_tile[(ty + 96u) * STRIDE + q], bx, by, bz, bw);
                acc7 = acc7 + product(a_tile[(ty + 112u) * STRIDE + q], bx, by, bz, bw);
            }
        }
        workgroupBarrier();
    }
    store_row(m0 + ty + 0u, n0, tx, acc0);
    if (TM > 1u) {
        store_row(m0 + ty + 16u, n0, tx, acc1);
    }
    if (TM > 2u) {
        store_row(m0 + ty + 32u, n0, tx, acc2);
        store_row(m0 + ty + 48u, n0, tx, acc3);
    }
    if (TM > 4u) {
        store_row(m0 + ty + 64u, n0, tx, acc4);
        store_row(m0 + ty + 80u, n0, tx, acc5);
        store_row(m0 + ty + 96u, n0, tx, acc6);
        store_row(m0 + ty + 112u, n0, tx, acc7);
    }
}
