// out[r, i] = weight[i] · x[r, i] / sqrt(mean_i(x[r, i]²) + eps)
// Grid: one workgroup per row, folded. Four elements per lane and step: width must be a multiple of 4.

const WG: u32 = 64u;

struct Params {
    rows: u32,
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;          // [rows, width / 4]
@group(0) @binding(1) var<storage, read> weight: array<vec4<f32>>;     // [width / 4]
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;  // [rows, width / 4]
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if (row >= params.rows) {
        return;
    }
    let quads = params.width / 4u;
    let first = row * quads;
    var squares = 0.0;
    for (var i = lane; i < quads; i = i + WG) {
        let value = x[first + i];
        squares = squares + dot(value, value);
    }
    let factor = inverseSqrt(workgroup_sum(squares, lane) / f32(params.width) + params.eps);
    for (var i = lane; i < quads; i = i + WG) {
        out[first + i] = x[first + i] * factor * weight[i];
    }
}
