// sum[r, i] = a[r, i] + b[r, i];  out[r, i] = weight[i] · sum[r, i] / sqrt(mean_i(sum[r, i]²) + eps)
// Grid: one workgroup per row, folded. Four elements per lane and step: width must be a multiple of 4.

const WG: u32 = 64u;

struct Params {
    rows: u32,
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read> a: array<vec4<f32>>;          // [rows, width / 4]
@group(0) @binding(1) var<storage, read> b: array<vec4<f32>>;          // [rows, width / 4]
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;     // [width / 4]
@group(0) @binding(3) var<storage, read_write> sum: array<vec4<f32>>;  // [rows, width / 4]
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;  // [rows, width / 4]
@group(0) @binding(5) var<uniform> params: Params;

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
        let value = a[first + i] + b[first + i];
        sum[first + i] = value;
        squares = squares + dot(value, value);
    }
    let factor = inverseSqrt(workgroup_sum(squares, lane) / f32(params.width) + params.eps);
    for (var i = lane; i < quads; i = i + WG) {
        out[first + i] = sum[first + i] * factor * weight[i];  // this lane wrote it above
    }
}
