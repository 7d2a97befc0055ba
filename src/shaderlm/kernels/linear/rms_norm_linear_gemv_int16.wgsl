// out[0, n] = epilogue(Σ_k q(v)[0, k] · w[n, k] / sqrt(mean(x²) + eps)), v[k] = norm_weight[k] · x[0, k]
// m = 1; q rounds to 16 bits with one scale per block of 32. What all results share, the root, is divided by at the end.
// Format of the weights, the work itself and the epilogue are included.
// Grid: ceil(n / (ROWS · WG / TEAM)) workgroups, folded. Needs k % 32 == 0.

struct Params {
    m: u32,
    k: u32,           // multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // groups of scales per row
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,     // length of a row of out
    epilogue: u32,    // what becomes of the sums
    eps: f32,
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;           // [m, k / 4]
@group(0) @binding(1) var<storage, read> norm_weight: array<vec4<f32>>; // [k / 4]
@group(0) @binding(2) var<storage, read> weight: array<vec4<u32>>;      // [n, …] as the included format lays it out
@group(0) @binding(3) var<storage, read> scales: array<u32>;            // [n, groups] as the format has them
@group(0) @binding(4) var<storage, read> bias: array<f32>;              // [n] if there is one
@group(0) @binding(5) var<storage, read> residual: array<f32>;          // [m, n_total] if there is one
@group(0) @binding(6) var<storage, read_write> out: array<f32>;         // [m, n_total]
@group(0) @binding(7) var<uniform> params: Params;

const NORM: bool = true;

fn weighted(quad: u32, value: vec4<f32>) -> vec4<f32> {
    return value * norm_weight[quad];
}

fn factor(squares: f32) -> f32 {
    return inverseSqrt(squares / f32(params.k) + params.eps);
}
