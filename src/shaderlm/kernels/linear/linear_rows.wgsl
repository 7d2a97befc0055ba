// out[tokens, n] = epilogue(Σ_k x[tokens, k] · w[n, k])        format of the weights and epilogue are included
// For adapters that compute on the CPU, where a barrier costs more than the memory it saves: each thread computes
// X_ROWS (1 or 2) rows of x × 8 rows of the weight alone, in registers, block by block of k. Edge threads clamp
// their rows and never store. Four neighbouring threads have the same rows of x (see the included inputs). Workgroups
// are small, so that all cores get their share of the few threads of a small product. (Four rows of x were 1.3 times as
// fast, but took three times as long to compile.)
// Grid: one thread per X_ROWS × 8 results, threads across n rounded up to a multiple of four, folded.
// Needs k % 32 == 0 and WG % 4 == 0.

const WG: u32 = 8u;
const X_ROWS: u32 = 2u;

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

struct Blocks {
    a: Packed, b: Packed, c: Packed, d: Packed,
}

fn load_blocks(rows: vec4<u32>, block: u32) -> Blocks {
    return Blocks(
        load_block(rows.x, block), load_block(rows.y, block), load_block(rows.z, block), load_block(rows.w, block),
    );
}

fn dots(p: Blocks, v: Inputs) -> vec4<f32> {
    return vec4<f32>(
        packed_dot(p.a, v.x0, v.x1, v.x2, v.x3, v.x4, v.x5, v.x6, v.x7),
        packed_dot(p.b, v.x0, v.x1, v.x2, v.x3, v.x4, v.x5, v.x6, v.x7),
        packed_dot(p.c, v.x0, v.x1, v.x2, v.x3, v.x4, v.x5, v.x6, v.x7),
        packed_dot(p.d, v.x0, v.x1, v.x2, v.x3, v.x4, v.x5, v.x6, v.x7),
    );
}

fn store_row(m: u32, n: u32, low: vec4<f32>, high: vec4<f32>) {
    store_pair(m, n, low.x, low.y);
    store_pair(m, n + 2u, low.z, low.w);
    store_pair(m, n + 4u, high.x, high.y);
    store_pair(m, n + 6u, high.z, high.w);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let across = (params.n + 31u) / 32u * 4u;
    let first = (group.x + group.y * groups.x) * WG;
    let rows = row_count();
    if (first / across * X_ROWS >= rows) {
        return;
    }
    let m0 = (first + lane) / across * X_ROWS;
    let n0 = (first + lane) % across * 8u;
    let last = params.n - 1u;
    let low = min(vec4<u32>(n0, n0 + 1u, n0 + 2u, n0 + 3u), vec4<u32>(last));
    let high = min(vec4<u32>(n0 + 4u, n0 + 5u, n0 + 6u, n0 + 7u), vec4<u32>(last));
    let inputs = min(vec2<u32>(m0, m0 + 1u), vec2<u32>(rows - 1u)) * (params.k / 4u);
    var low0 = vec4<f32>();
    var low1 = vec4<f32>();
    var high0 = vec4<f32>();
    var high1 = vec4<f32>();
    for (var block = 0u; block < params.k / 32u; block = block + 1u) {
        let p = load_blocks(low, block);
        let q = load_blocks(high, block);
        // What a block's dot product has to unpack is the same for every row of x: a compiler does it once.
        let v0 = load_inputs(inputs.x + 8u * block, lane);
        low0 = low0 + dots(p, v0);
        high0 = high0 + dots(q, v0);
        if (X_ROWS > 1u) {
            let v1 = load_inputs(inputs.y + 8u * block, lane);
            low1 = low1 + dots(p, v1);
            high1 = high1 + dots(q, v1);
        }
    }
    store_row(m0, n0, low0, high0);
    if (X_ROWS > 1u) {
        store_row(m0 + 1u, n0, low1, high1);
    }
}
