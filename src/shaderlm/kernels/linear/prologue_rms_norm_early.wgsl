// Prologue rms_norm: x becomes norm_weight[k] · x[k] / sqrt(mean(x²) + eps)
// As prologue_rms_norm, for skip_rms_norm: the weights of the quads that a lane rounds are asked for with these.
// Exports: NORM, load_weights(quad), load_more_weights(quad), weighted(quad, value), factor(squares). Needs: quads_are_own(),
// params.k, params.eps and WG.

@group(0) @binding(0) var<storage, read> norm_weight: array<vec4<f32>>; // [k / 4]

const NORM: bool = true;

var<private> first_weight: vec4<f32>;
var<private> second_weight: vec4<f32>;
var<private> third_weight: vec4<f32>;
var<private> fourth_weight: vec4<f32>;

fn load_weights(at: u32) {
    first_weight = norm_weight[at];
    second_weight = norm_weight[at + 1u];
}

fn load_more_weights(at: u32) {
    third_weight = norm_weight[at];
    fourth_weight = norm_weight[at + 1u];
}

fn weighted(quad: u32, value: vec4<f32>) -> vec4<f32> {
    if (quads_are_own()) {
        if (params.k > 8u * WG && quad >= 2u * WG) {
            return value * select(third_weight, fourth_weight, quad % 2u == 1u);
        }
        return value * select(first_weight, second_weight, quad % 2u == 1u);
    }
    return value * norm_weight[quad];
}

fn factor(squares: f32) -> f32 {
    return inverseSqrt(squares / f32(params.k) + params.eps);
}
