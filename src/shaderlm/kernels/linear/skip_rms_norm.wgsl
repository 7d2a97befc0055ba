// Inputs of a product of one row: skip[k] + post_weight[k] · x[k] / sqrt(mean(x²) + eps), which the first workgroup also stores,
// as sum. Exports: quads_are_own(), begin_inputs(lane, size, workgroup), input_at(i), keep_input(i, value).
// Every workgroup sums x² for itself. Needs: prologue_rms_norm_early, x, params.k, params.eps, WG, STAGE, squares: an f32 for
// each subgroup, which may be used for something else after the next barrier.

@group(0) @binding(0) var<storage, read> skip: array<vec4<f32>>;         // [k / 4]
@group(0) @binding(1) var<storage, read> post_weight: array<vec4<f32>>;  // [k / 4]
@group(0) @binding(2) var<storage, read_write> sum: array<vec4<f32>>;    // [k / 4]

var<private> keeps: bool;  // is this the workgroup that stores?
var<private> root: f32;    // 1 / sqrt(mean(x²) + eps)
// The quads that a lane rounds: two of a block, and two of the block that lies WG / 4 further. Where there are no more, they
// are asked for before Σ x² is known.
var<private> first_quad: vec4<f32>;
var<private> second_quad: vec4<f32>;
var<private> third_quad: vec4<f32>;
var<private> fourth_quad: vec4<f32>;

fn quads_are_own() -> bool {
    return params.k <= 16u * WG && params.k <= 32u * STAGE;
}

// `size`: lanes of a subgroup. All lanes are here.
fn begin_inputs(lane: u32, size: u32, workgroup: u32) {
    let quads = params.k / 4u;
    let own = lane / 4u * 8u + lane % 4u * 2u;
    let at = min(own, quads - 2u);
    let x0 = x[at];
    let x1 = x[at + 1u];
    let skip0 = skip[at];
    let skip1 = skip[at + 1u];
    let weight0 = post_weight[at];
    let weight1 = post_weight[at + 1u];
    load_weights(at);
    var square = select(0.0, dot(x0, x0) + dot(x1, x1), own < quads);
    let further = min(own + 2u * WG, quads - 2u);
    var x2 = vec4<f32>();
    var x3 = vec4<f32>();
    var skip2 = vec4<f32>();
    var skip3 = vec4<f32>();
    var weight2 = vec4<f32>();
    var weight3 = vec4<f32>();
    if (params.k > 8u * WG) {
        x2 = x[further];
        x3 = x[further + 1u];
        skip2 = skip[further];
        skip3 = skip[further + 1u];
        weight2 = post_weight[further];
        weight3 = post_weight[further + 1u];
        load_more_weights(further);
        square = square + select(0.0, dot(x2, x2) + dot(x3, x3), own + 2u * WG < quads);
    }
    for (var i = 4u * WG + lane; i < quads; i = i + WG) {
        square = square + dot(x[i], x[i]);
    }
    let part = subgroupAdd(square);
    if (lane % size == 0u) {
        squares[lane / size] = part;
    }
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < WG / size; i = i + 1u) {
        total = total + squares[i];
    }
    root = inverseSqrt(total / f32(params.k) + params.eps);
    first_quad = skip0 + x0 * (weight0 * root);
    second_quad = skip1 + x1 * (weight1 * root);
    third_quad = skip2 + x2 * (weight2 * root);
    fourth_quad = skip3 + x3 * (weight3 * root);
    keeps = workgroup == 0u;
}

fn input_at(i: u32) -> vec4<f32> {
    if (quads_are_own()) {
        if (params.k > 8u * WG && i >= 2u * WG) {
            return select(third_quad, fourth_quad, i % 2u == 1u);
        }
        return select(first_quad, second_quad, i % 2u == 1u);
    }
    return skip[i] + x[i] * (post_weight[i] * root);
}

fn keep_input(i: u32, value: vec4<f32>) {
    if (keeps) {
        sum[i] = value;
    }
}
