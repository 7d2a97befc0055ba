// out[t, h] = rotate(norm(x[t, h], weight))        norm(x, w) = w · x / sqrt(mean(x²) + eps), over a head
// As rms_norm_rope_kv_write, for queries alone; x may be columns of a matrix. rotate is included.
// Grid: one workgroup per head of x, folded. Needs D % 4 == 0, and rotary % 8 == 0 (interleaved: % 4).

const WG: u32 = 64u;

struct Params {
    heads: u32,
    quads: u32,   // D / 4
    rotary: u32,  // quads of a head that are rotated
    first: u32,
    stride: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;         // [tokens, stride]
@group(0) @binding(1) var<storage, read> weight: array<vec4<f32>>;    // [quads]
@group(0) @binding(2) var<storage, read> batch: array<vec4<u32>>;     // [1 + tokens]
@group(0) @binding(3) var<storage, read> table: array<vec4<f32>>;     // [rows, rotary] of (cos, sin, cos, sin)
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>; // [tokens, heads, quads]
@group(0) @binding(5) var<uniform> params: Params;

// What is needed of a quad of a head: its values, the same weighted, those that are rotated with them, weighted, and by what.
struct Quad {
    raw: vec4<f32>,
    own: vec4<f32>,
    mate: vec4<f32>,
    turn: Turn,
}

// Quad i of a head that starts at `first`.
fn quad_at(first: u32, i: u32, position: u32) -> Quad {
    let raw = x[first + i];
    let own = raw * weight[i];
    if (INTERLEAVED || i >= params.rotary) {
        return Quad(raw, own, own, turn_at(position, min(i, params.rotary - 1u)));
    }
    let mate = partner(i);
    return Quad(raw, own, x[first + mate] * weight[mate], turn_at(position, i));
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let token = index / params.heads;
    if (token >= batch_rows()) {
        return;
    }
    let first = token * params.stride + params.first + index % params.heads * params.quads;
    let position = min(batch_row(token).position, arrayLength(&table) / params.rotary - 1u);
    // All of the first quad is asked for before the sum over the head: each trip to memory takes as long as the rest.
    let early = quad_at(first, min(lane, params.quads - 1u), position);
    var squares = select(0.0, dot(early.raw, early.raw), lane < params.quads);
    for (var i = lane + WG; i < params.quads; i = i + WG) {
        squares = squares + dot(x[first + i], x[first + i]);
    }
    let factor = inverseSqrt(workgroup_sum(squares, lane) / f32(4u * params.quads) + params.eps);
    for (var i = lane; i < params.quads; i = i + WG) {
        var quad = early;
        if (i >= WG) {
            quad = quad_at(first, i, position);
        }
        var value = factor * quad.own;
        if (i < params.rotary) {
            value = rotate(value, factor * quad.mate, quad.turn, i);
        }
        out[index * params.quads + i] = value;
    }
}
