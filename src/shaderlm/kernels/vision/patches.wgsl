// out[p, (c, y, i)] = x[corner of patch p + y · stride + 3 · i + c] · factors[c] + factors[3 + c]; zeros up to the width
// x is f32 or bytes: that is included.
// Grid: one thread per value of out, folded.

const WG: u32 = 64u;

struct Params {
    tokens: u32,
    side: u32,   // of a patch
    width: u32,  // values of a row of out, 3 · patch² or more
}

@group(0) @binding(0) var<storage, read> x: array<u32>;               // pictures, [rows, columns, 3] each
@group(0) @binding(1) var<storage, read> corners: array<vec2<u32>>;   // [tokens]: the first value, values of a row
@group(0) @binding(2) var<storage, read> factors: array<f32>;         // [6]
@group(0) @binding(3) var<storage, read_write> out: array<f32>;       // [tokens, width]
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let p = index / params.width;
    if (p >= params.tokens) {
        return;
    }
    let value = index % params.width;
    let area = params.side * params.side;
    let c = value / area;
    if (c >= 3u) {
        out[index] = 0.0;
        return;
    }
    let y = value % area / params.side;
    let i = value % params.side;
    let at = corners[p].x + y * corners[p].y + 3u * i + c;
    out[index] = pixel_value(at) * factors[c] + factors[3u + c];
}
