// out[t, :] = factor · w[id of row t, :]        weights in the format that is included
// The id of a row is in its record, or is the token sampled last for a sequence: LAST | s stands for tokens[s].
// The weight may come in row ranges: a dispatch writes the tokens whose id lies in its range.
// Grid: one thread per four values of out, folded. Needs k % 32 == 0.

const WG: u32 = 64u;

struct Params {
    tokens: u32,
    k: u32,
    n: u32,        // rows of this range
    n_first: u32,  // id of its first row
    groups: u32,   // groups of scales per row
    factor: f32,
}

@group(0) @binding(0) var<storage, read> batch: array<vec4<u32>>;      // [1 + tokens]: counts, then (id, position, slot, pages)
@group(0) @binding(1) var<storage, read> tokens: array<u32>;           // last token of each sequence slot
@group(0) @binding(2) var<storage, read> weight: array<vec4<u32>>;     // [n, …] as the included format lays it out
@group(0) @binding(3) var<storage, read> scales: array<u32>;           // [n, groups] as the format has them
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;  // [tokens, k / 4]
@group(0) @binding(5) var<uniform> params: Params;

const LAST: u32 = 0x80000000u;

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
    var id = batch[1u + token].x;
    if (id >= LAST) {
        id = tokens[id - LAST];
    }
    if (id >= params.n_first && id - params.n_first < params.n) {
        out[index] = params.factor * weight4(id - params.n_first, index % quads);
    }
}
