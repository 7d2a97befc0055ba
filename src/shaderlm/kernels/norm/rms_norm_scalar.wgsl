// out[r, i] = finish(beside(r, i), weight(i) · v[r, i] / sqrt(mean_i(v[r, i]²) + eps))        finish, v and weight are included
// The baseline: a workgroup per row, one element per lane and step, the row read twice. Any width.
// Grid: one workgroup per row of a token, folded.

const WG: u32 = 64u;
alias value = f32;

struct Params {
    tokens: u32,
    heads: u32,  // rows of a token
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read_write> out: array<value>;  // [tokens, heads, width]
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
    let first = row * params.width;
    var squares = 0.0;
    for (var i = lane; i < params.width; i = i + WG) {
        let v = input_at(first + i);
        keep_input(first + i, v);
        squares = squares + v * v;
    }
    let factor = inverseSqrt(workgroup_sum(squares, lane) / f32(params.width) + params.eps);
    for (var i = lane; i < params.width; i = i + WG) {
        out[first + i] = finish(beside_at(first + i), input_at(first + i) * factor * weight_at(i));
    }
}
