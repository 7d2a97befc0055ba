// out[r, i] = x[outputs[r].row, i]: the rows of a step that give logits
// Grid: one thread per value of out, folded. Rows past the true number of outputs are left alone.

const WG: u32 = 64u;

struct Params {
    tokens: u32,  // rows of x
    rows: u32,    // rows of out
    width: u32,
}

struct Output {
    row: u32,
    rest: array<u32, 7>,  // which sequence gets the token, and how it is sampled
}

@group(0) @binding(0) var<storage, read> x: array<f32>;            // [tokens, width]
@group(0) @binding(1) var<storage, read> outputs: array<Output>;   // [rows]
@group(0) @binding(2) var<storage, read> batch: array<vec4<u32>>;  // [1 + tokens]: (rows, outputs, 0, 0), then the rows
@group(0) @binding(3) var<storage, read_write> out: array<f32>;    // [rows, width]
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let r = index / params.width;
    if (r >= min(params.rows, batch[0].y)) {
        return;
    }
    out[index] = x[min(outputs[r].row, params.tokens - 1u) * params.width + index % params.width];
}
