// out[t, i] = apply(gate[t, first + i], b[t, i])        `apply` is included
// A value is f32, or four of them as vec4<f32>. Grid: one thread per value, folded.

const WG: u32 = 256u;
alias value = vec4<f32>;

struct Params {
    tokens: u32,
    per_token: u32,  // values of b and out for each token
    stride: u32,     // between rows of gate
    first: u32,      // column of gate
}

@group(0) @binding(0) var<storage, read> gate: array<value>;       // [tokens, stride]
@group(0) @binding(1) var<storage, read> b: array<value>;          // [tokens, per_token]
@group(0) @binding(2) var<storage, read_write> out: array<value>;  // [tokens, per_token]
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    if (index < row_count() * params.per_token) {
        let t = index / params.per_token;
        out[index] = apply(gate[t * params.stride + params.first + index % params.per_token], b[index]);
    }
}
