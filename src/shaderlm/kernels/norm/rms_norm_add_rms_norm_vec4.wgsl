// sum[r, i] = a[r, i] + weight[i] · b[r, i] / sqrt(mean_i(b[r, i]²) + eps)
// out[r, i] = next_weight[i] · sum[r, i] / sqrt(mean_i(sum[r, i]²) + eps)
// A workgroup per row, four elements per lane and step: width must be a multiple of 4. The first KEEP steps stay in registers,
// with everything loaded before the first sum; the others are read again.
// Grid: one workgroup per row of a token, folded.

const WG: u32 = 64u;
const KEEP: u32 = 4u;  // quads per lane in registers, 1 to 4

struct Params {
    tokens: u32,
    heads: u32,  // rows of a token
    width: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read> a: array<vec4<f32>>;            // [tokens, heads, width / 4]
@group(0) @binding(1) var<storage, read> b: array<vec4<f32>>;            // [tokens, heads, width / 4]
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;       // [width / 4]
@group(0) @binding(3) var<storage, read> next_weight: array<vec4<f32>>;  // [width / 4]
@group(0) @binding(4) var<storage, read_write> sum: array<vec4<f32>>;    // [tokens, heads, width / 4]
@group(0) @binding(5) var<storage, read_write> out: array<vec4<f32>>;    // [tokens, heads, width / 4]
@group(0) @binding(6) var<uniform> params: Params;

// What is needed of a quad.
struct Quad {
    a: vec4<f32>,
    b: vec4<f32>,
    weight: vec4<f32>,
    next_weight: vec4<f32>,
}

// Past the end it is all zeros, and counts for nothing.
fn quad_at(first: u32, i: u32, wanted: bool) -> Quad {
    var found = Quad();
    if (wanted && i < params.width / 4u) {
        found = Quad(a[first + i], b[first + i], weight[i], next_weight[i]);
    }
    return found;
}

fn added(quad: Quad, factor: f32) -> vec4<f32> {
    return quad.a + quad.b * (quad.weight * factor);
}

fn store(first: u32, i: u32, value: vec4<f32>, scale: vec4<f32>) {
    if (i < params.width / 4u) {
        sum[first + i] = value;
        out[first + i] = value * scale;
    }
}

fn root(squares: f32) -> f32 {
    return inverseSqrt(squares / f32(params.width) + params.eps);
}

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
    let i1 = lane + WG;
    let i2 = lane + 2u * WG;
    let i3 = lane + 3u * WG;
    let v0 = quad_at(first, lane, true);
    let v1 = quad_at(first, i1, KEEP > 1u);
    let v2 = quad_at(first, i2, KEEP > 2u);
    let v3 = quad_at(first, i3, KEEP > 3u);
    var squares = dot(v0.b, v0.b) + dot(v1.b, v1.b) + dot(v2.b, v2.b) + dot(v3.b, v3.b);
    for (var i = lane + KEEP * WG; i < quads; i = i + WG) {
        squares = squares + dot(b[first + i], b[first + i]);
    }
    let factor = root(workgroup_sum(squares, lane));
    let s0 = added(v0, factor);
    let s1 = added(v1, factor);
    let s2 = added(v2, factor);
    let s3 = added(v3, factor);
    squares = dot(s0, s0) + dot(s1, s1) + dot(s2, s2) + dot(s3, s3);
    for (var i = lane + KEEP * WG; i < quads; i = i + WG) {
        let s = added(quad_at(first, i, true), factor);
        squares = squares + dot(s, s);
    }
    let next = root(workgroup_sum(squares, lane));
    store(first, lane, s0, v0.next_weight * next);
    if (KEEP > 1u) {
        store(first, i1, s1, v1.next_weight * next);
    }
    if (KEEP > 2u) {
        store(first, i2, s2, v2.next_weight * next);
    }
    if (KEEP > 3u) {
        store(first, i3, s3, v3.next_weight * next);
    }
    for (var i = lane + KEEP * WG; i < quads; i = i + WG) {
        store(first, i, added(quad_at(first, i, true), factor), next_weight[i] * next);
    }
}
