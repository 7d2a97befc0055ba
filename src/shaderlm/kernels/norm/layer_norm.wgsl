// out[r, i] = weight[i] · (x[r, i] − mean_i(x[r, i])) / sqrt(mean_i((x[r, i] − mean)²) + eps) + bias(i)        bias is included
// A workgroup per row, one value or four per lane and step. The mean comes first: squares of what is left are small, and
// nothing cancels. The first step stays in registers. An included file adds up the values of a step.
// Grid: one workgroup per row of a token, folded.

const WG: u32 = 64u;
alias value = vec4<f32>;

struct Params {
    tokens: u32,
    heads: u32,  // rows of a token
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read> x: array<value>;          // [tokens, heads, width]
@group(0) @binding(1) var<storage, read> weight: array<value>;     // [width]
@group(0) @binding(2) var<storage, read_write> out: array<value>;  // [tokens, heads, width]
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if (row >= row_count() * params.heads) {
        return;
    }
    let count = params.width / VALUES;
    let first = row * count;
    let v0 = x[first + min(lane, count - 1u)];  // past the end it counts for nothing
    var sum = select(0.0, total(v0), lane < count);
    for (var i = lane + WG; i < count; i = i + WG) {
        sum = sum + total(x[first + i]);
    }
    let mean = workgroup_sum(sum, lane) / f32(params.width);
    let c0 = v0 - value(mean);
    var squares = select(0.0, total(c0 * c0), lane < count);
    for (var i = lane + WG; i < count; i = i + WG) {
        let c = x[first + i] - value(mean);
        squares = squares + total(c * c);
    }
    let factor = inverseSqrt(workgroup_sum(squares, lane) / f32(params.width) + params.eps);
    if (lane < count) {
        out[first + lane] = c0 * factor * weight[lane] + bias_at(lane);
    }
    for (var i = lane + WG; i < count; i = i + WG) {
        out[first + i] = (x[first + i] - value(mean)) * factor * weight[i] + bias_at(i);
    }
}
