// Prologue rms_norm: x becomes norm_weight[k] · x[k] / sqrt(mean(x²) + eps)
// The weight is multiplied before rounding; the root, which all results share, divides the sums at the end.
// Exports: NORM, weighted(quad, value), factor(squares). Needs: params.k and params.eps.

@group(0) @binding(0) var<storage, read> norm_weight: array<vec4<f32>>; // [k / 4]

const NORM: bool = true;

fn weighted(quad: u32, value: vec4<f32>) -> vec4<f32> {
    return value * norm_weight[quad];
}

fn factor(squares: f32) -> f32 {
    return inverseSqrt(squares / f32(params.k) + params.eps);
}
