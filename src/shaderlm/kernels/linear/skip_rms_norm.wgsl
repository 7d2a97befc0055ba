// Inputs of a product of one row: skip[k] + post_weight[k] · x[k] / sqrt(mean(x²) + eps), which the first workgroup also stores,
// as sum. Exports: begin_inputs(lane, size, workgroup), input_at(i), keep_input(i, value).
// Every workgroup sums x² for itself. Needs: x, params.k, params.eps, WG, squares: an f32 for each subgroup, which may be used
// for something else after the next barrier.

@group(0) @binding(0) var<storage, read> skip: array<vec4<f32>>;         // [k / 4]
@group(0) @binding(1) var<storage, read> post_weight: array<vec4<f32>>;  // [k / 4]
@group(0) @binding(2) var<storage, read_write> sum: array<vec4<f32>>;    // [k / 4]

var<private> root: f32;    // 1 / sqrt(mean(x²) + eps)
var<private> keeps: bool;  // is this the workgroup that stores?

// `size`: lanes of a subgroup. All lanes are here.
fn begin_inputs(lane: u32, size: u32, workgroup: u32) {
    let quads = params.k / 4u;
    var square = 0.0;
    for (var base = 0u; base < quads; base = base + WG) {
        let i = base + lane;
        let value = select(vec4<f32>(), x[min(i, quads - 1u)], i < quads);
        square = square + dot(value, value);
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
    keeps = workgroup == 0u;
}

fn input_at(i: u32) -> vec4<f32> {
    return skip[i] + x[i] * (post_weight[i] * root);
}

fn keep_input(i: u32, value: vec4<f32>) {
    if (keeps) {
        sum[i] = value;
    }
}
