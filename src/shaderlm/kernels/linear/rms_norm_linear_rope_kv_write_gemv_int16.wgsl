// y[n] = bias[n] + Σ_k q(v)[k] · w[n, k] / sqrt(mean(x²) + eps), v[k] = norm_weight[k] · x[k]; rows of w: queries, keys, values
// out = rotate(queries of y);  k_cache[pos] = rotate(keys of y);  v_cache[pos] = values of y,  pos = positions[0]
// rotate: (u, v) → (u·cos − v·sin, u·sin + v·cos) for elements 2i and 2i + 1 of a head; those past `rotary` are copied.
// One row of x; q rounds to 16 bits with one scale per block of 32. Format of the weights and the work itself are included.
// Grid: ceil(n / (ROWS · WG / TEAM)) workgroups, folded. Needs k % 32 == 0, even D, ROWS > 1.

struct Params {
    m: u32,
    k: u32,           // multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // groups of scales per row
    n_first: u32,     // where this range starts
    n_total: u32,
    epilogue: u32,    // 1 if there is a bias
    eps: f32,
    queries: u32,     // rows of queries
    keys: u32,        // rows of keys, and as many of values
    width: u32,       // D
    rotary: u32,      // elements of a head that are rotated
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;               // [k / 4]
@group(0) @binding(1) var<storage, read> norm_weight: array<vec4<f32>>;     // [k / 4]
@group(0) @binding(2) var<storage, read> weight: array<vec4<u32>>;          // [n, …] as the included format lays it out
@group(0) @binding(3) var<storage, read> scales: array<u32>;                // [n, groups] as the format has them
@group(0) @binding(4) var<storage, read> bias: array<f32>;                  // [n] if there is one
@group(0) @binding(5) var<storage, read> positions: array<u32>;             // [1]
@group(0) @binding(6) var<storage, read> table: array<vec2<f32>>;           // [rows, rotary / 2] of (cos, sin)
@group(0) @binding(7) var<storage, read_write> out: array<vec2<f32>>;       // [queries / 2]
@group(0) @binding(8) var<storage, read_write> k_cache: array<cache_pair>;  // [C, keys / 2]
@group(0) @binding(9) var<storage, read_write> v_cache: array<cache_pair>;  // [C, keys / 2]
@group(0) @binding(10) var<uniform> params: Params;

const NORM: bool = true;

fn weighted(quad: u32, value: vec4<f32>) -> vec4<f32> {
    return value * norm_weight[quad];
}

fn factor(squares: f32) -> f32 {
    return inverseSqrt(squares / f32(params.k) + params.eps);
}

var<private> position: u32;
var<private> turns: vec4<f32>;  // of the first pair of rows, and of the second

fn turn_of(row: u32) -> vec2<f32> {
    let i = row % params.width;
    if (row < params.queries + params.keys && i < params.rotary) {
        return table[(position * params.rotary + i) / 2u];
    }
    return vec2<f32>(1.0, 0.0);
}

// Before the weights are multiplied: at the end there would be nothing to hide the wait for the table.
fn begin(first: u32) {
    position = positions[0];
    turns = vec4<f32>(turn_of(params.n_first + first), turn_of(params.n_first + first + 2u));
}

fn biased(n: u32, sum: f32) -> f32 {
    if (params.epilogue != 0u) {
        return sum + bias[n];
    }
    return sum;
}

fn store_turned(n: u32, sum: f32, next: f32, turn: vec2<f32>) {
    if (n >= params.n) {
        return;
    }
    let y = vec2<f32>(biased(n, sum), biased(n + 1u, next));
    let value = vec2<f32>(y.x * turn.x - y.y * turn.y, y.x * turn.y + y.y * turn.x);
    let row = params.n_first + n;
    if (row < params.queries) {
        out[row / 2u] = value;
    } else if (row < params.queries + params.keys) {
        k_cache[(position * params.keys + row - params.queries) / 2u] = cache_pack_pair(value);
    } else {
        v_cache[(position * params.keys + row - params.queries - params.keys) / 2u] = cache_pack_pair(value);
    }
}

fn store_rows(first: u32, sums: vec4<f32>) {
    store_turned(first, sums.x, sums.y, turns.xy);
    if (ROWS > 2u) {
        store_turned(first + 2u, sums.z, sums.w, turns.zw);
    }
}
