// out[0, n] = bias[n] + Σ_k x[0, k] · w[n, k]        m = 1, weights in the format that is included
// WG threads make WG / TEAM teams; a team computes ROWS rows (1, 2 or 4), its lanes share their k in blocks of
// 32: a block of x is loaded once for all rows, a block of q4 weights is one 16-byte load.
// Grid: ceil(n / (ROWS · WG / TEAM)) workgroups, folded. Needs k % 32 == 0.

const WG: u32 = 256u;
const TEAM: u32 = 64u;
const ROWS: u32 = 2u;
const HAS_BIAS: bool = false;

struct Params {
    m: u32,
    k: u32,           // multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // scales per row
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;      // [m, k / 4]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // [n, groups] f32, or f16 in pairs
@group(0) @binding(3) var<storage, read> bias: array<f32>;         // [n] if HAS_BIAS
@group(0) @binding(4) var<storage, read_write> out: array<f32>;    // [m, n_total]
@group(0) @binding(5) var<uniform> params: Params;

fn store(row: u32, value: f32) {
    if (row < params.n) {
        var total = value;
        if (HAS_BIAS) {
            total = total + bias[row];
        }
        out[params.n_first + row] = total;
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let first = ((group.x + group.y * groups.x) * (WG / TEAM) + lane / TEAM) * ROWS;
    let last = params.n - 1u;  // rows past the end are computed as the last one and never stored
    let rows = min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(last));
    let blocks = params.k / 32u;
    var acc = vec4<f32>();
    for (var block = lane % TEAM; block < blocks; block = block + TEAM) {
        let i = block * 8u;
        let x0 = x[i];
        let x1 = x[i + 1u];
        let x2 = x[i + 2u];
        let x3 = x[i + 3u];
        let x4 = x[i + 4u];
        let x5 = x[i + 5u];
        let x6 = x[i + 6u];
        let x7 = x[i + 7u];
        acc.x = acc.x + packed_dot(load_block(rows.x, block), x0, x1, x2, x3, x4, x5, x6, x7);
        if (ROWS > 1u) {
            acc.y = acc.y + packed_dot(load_block(rows.y, block), x0, x1, x2, x3, x4, x5, x6, x7);
        }
        if (ROWS > 2u) {
            acc.z = acc.z + packed_dot(load_block(rows.z, block), x0, x1, x2, x3, x4, x5, x6, x7);
            acc.w = acc.w + packed_dot(load_block(rows.w, block), x0, x1, x2, x3, x4, x5, x6, x7);
        }
    }
    acc = team_sum(acc, lane);
    if (lane % TEAM == 0u) {
        store(first, acc.x);
        if (ROWS > 1u) {
            store(first + 1u, acc.y);
        }
        if (ROWS > 2u) {
            store(first + 2u, acc.z);
            store(first + 3u, acc.w);
        }
    }
}
