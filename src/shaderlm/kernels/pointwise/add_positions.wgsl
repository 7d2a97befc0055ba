// out[t, :] = x[t, :] + w[position of row t, :]        weights in the format that is included
// The weight may come in row ranges: a dispatch writes the rows whose position lies in its range. A position past the end
// of the weight leaves its row as it was.
// Grid: one thread per four values of out, folded. Needs k % 32 == 0.

const WG: u32 = 64u;

struct Params {
    tokens: u32,
    k: u32,
    n: u32,        // rows of this range
    n_first: u32,  // position of its first row
    groups: u32,   // groups of scales per row
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;          // [tokens, k / 4]
@group(0) @binding(1) var<storage, read> batch: array<vec4<u32>>;      // [1 + tokens]: counts, then (id, position, slot, pages)
@group(0) @binding(2) var<storage, read> weight: array<vec4<u32>>;     // [n, …] as the included format lays it out
@group(0) @binding(3) var<storage, read> scales: array<u32>;           // [n, groups] as the format has them
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;  // [tokens, k / 4]
@group(0) @binding(5) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let quads = params.k / 4u;
    let token = index / quads;
    if (token >= min(params.tokens, batch[0].x)) {
        return;
    }
    let position = batch[1u + token].y;
    if (position >= params.n_first && position - params.n_first < params.n) {
        out[index] = x[index] + weight4(position - params.n_first, index % quads);
    }
}
