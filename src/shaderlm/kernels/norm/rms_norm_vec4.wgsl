// out[r, i] = finish(beside(r, i), weight(i) · v[r, i] / sqrt(mean_i(v[r, i]²) + eps))        finish, v and weight are included
// A workgroup per row, four elements per lane and step: width must be a multiple of 4. The first KEEP steps stay in registers;
// their weights and what is beside them are loaded while the row is summed: most rows are read once.
// Grid: one workgroup per row of a token, folded.

const WG: u32 = 64u;
const KEEP: u32 = 4u;  // quads per lane in registers, 1 to 4
alias value = vec4<f32>;

struct Params {
    tokens: u32,
    heads: u32,  // rows of a token
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read_write> out: array<value>;  // [tokens, heads, width / 4]
@group(0) @binding(1) var<uniform> params: Params;

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
    let quads = params.width / 4u;
    let first = row * quads;
    let last = quads - 1u;
    let i1 = lane + WG;
    let i2 = lane + 2u * WG;
    let i3 = lane + 3u * WG;
    // Lanes past the end read the last quad again; it counts for nothing.
    let v0 = input_at(first + min(lane, last));
    var v1 = vec4<f32>();
    var v2 = vec4<f32>();
    var v3 = vec4<f32>();
    let w0 = weight_at(min(lane, last));
    var w1 = vec4<f32>();
    var w2 = vec4<f32>();
    var w3 = vec4<f32>();
    let b0 = beside_at(first + min(lane, last));
    var b1 = vec4<f32>();
    var b2 = vec4<f32>();
    var b3 = vec4<f32>();
    if (KEEP > 1u) {
        v1 = input_at(first + min(i1, last));
        w1 = weight_at(min(i1, last));
        b1 = beside_at(first + min(i1, last));
    }
    if (KEEP > 2u) {
        v2 = input_at(first + min(i2, last));
        w2 = weight_at(min(i2, last));
        b2 = beside_at(first + min(i2, last));
    }
    if (KEEP > 3u) {
        v3 = input_at(first + min(i3, last));
        w3 = weight_at(min(i3, last));
        b3 = beside_at(first + min(i3, last));
    }
    var squares = select(0.0, dot(v0, v0), lane < quads)
        + select(0.0, dot(v1, v1), i1 < quads)
        + select(0.0, dot(v2, v2), i2 < quads)
        + select(0.0, dot(v3, v3), i3 < quads);
    for (var i = lane + KEEP * WG; i < quads; i = i + WG) {
        let v = input_at(first + i);
        squares = squares + dot(v, v);
    }
    let factor = inverseSqrt(workgroup_sum(squares, lane) / f32(params.width) + params.eps);
    if (lane < quads) {
        store(first + lane, v0, factor * w0, b0);
    }
    if (KEEP > 1u && i1 < quads) {
        store(first + i1, v1, factor * w1, b1);
    }
    if (KEEP > 2u && i2 < quads) {
        store(first + i2, v2, factor * w2, b2);
    }
    if (KEEP > 3u && i3 < quads) {
        store(first + i3, v3, factor * w3, b3);
    }
    for (var i = lane + KEEP * WG; i < quads; i = i + WG) {
        store(first + i, input_at(first + i), factor * weight_at(i), beside_at(first + i));
    }
}

fn store(i: u32, v: vec4<f32>, scale: vec4<f32>, beside: vec4<f32>) {
    keep_input(i, v);
    out[i] = finish(beside, v * scale);
}
