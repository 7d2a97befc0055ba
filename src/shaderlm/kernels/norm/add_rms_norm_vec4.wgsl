// sum[r, i] = a[r, i] + b[r, i];  out[r, i] = weight[i] · sum[r, i] / sqrt(mean_i(sum[r, i]²) + eps)
// Grid: one workgroup per row, folded. Four elements per lane and step: width must be a multiple of 4.
// The first KEEP steps stay in registers and their weights are on the way while the row is summed: most rows are read once.

const WG: u32 = 64u;
const KEEP: u32 = 4u;  // quads per lane in registers, 1 to 4

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
    let last = quads - 1u;
    let i1 = lane + WG;
    let i2 = lane + 2u * WG;
    let i3 = lane + 3u * WG;
    // Lanes past the end read the last quad again; it counts for nothing.
    let v0 = a[first + min(lane, last)] + b[first + min(lane, last)];
    var v1 = vec4<f32>();
    var v2 = vec4<f32>();
    var v3 = vec4<f32>();
    let w0 = weight[min(lane, last)];
    var w1 = vec4<f32>();
    var w2 = vec4<f32>();
    var w3 = vec4<f32>();
    if (KEEP > 1u) {
        v1 = a[first + min(i1, last)] + b[first + min(i1, last)];
        w1 = weight[min(i1, last)];
    }
    if (KEEP > 2u) {
        v2 = a[first + min(i2, last)] + b[first + min(i2, last)];
        w2 = weight[min(i2, last)];
    }
    if (KEEP > 3u) {
        v3 = a[first + min(i3, last)] + b[first + min(i3, last)];
        w3 = weight[min(i3, last)];
    }
    var squares = select(0.0, dot(v0, v0), lane < quads)
        + select(0.0, dot(v1, v1), i1 < quads)
        + select(0.0, dot(v2, v2), i2 < quads)
        + select(0.0, dot(v3, v3), i3 < quads);
    for (var i = lane + KEEP * WG; i < quads; i = i + WG) {
        let value = a[first + i] + b[first + i];
        sum[first + i] = value;
        squares = squares + dot(value, value);
    }
    let factor = inverseSqrt(workgroup_sum(squares, lane) / f32(params.width) + params.eps);
    if (lane < quads) {
        sum[first + lane] = v0;
        out[first + lane] = v0 * factor * w0;
    }
    if (KEEP > 1u && i1 < quads) {
        sum[first + i1] = v1;
        out[first + i1] = v1 * factor * w1;
    }
    if (KEEP > 2u && i2 < quads) {
        sum[first + i2] = v2;
        out[first + i2] = v2 * factor * w2;
    }
    if (KEEP > 3u && i3 < quads) {
        sum[first + i3] = v3;
        out[first + i3] = v3 * factor * w3;
    }
    for (var i = lane + KEEP * WG; i < quads; i = i + WG) {
        out[first + i] = sum[first + i] * factor * weight[i];  // this lane wrote the sum above
    }
}
