// out[t, h] = rotate(norm(q[t, h], q_norm));  k_cache[slot of row t, h] = rotate(norm(k[t, h], k_norm));
// v_cache[slot of row t] = v[t]        norm(x, w) = w · x / sqrt(mean(x²) + eps), over a head
// As rope_kv_write otherwise: rotate and quads of heads are included; q, k and v may be columns of one matrix; a slot outside
// the pool, which NONE is, takes nothing.
// Grid: one workgroup per head of q, k and v, folded. Needs D % 4 == 0, and rotary % 8 == 0 (interleaved: % 4).

const WG: u32 = 64u;

struct Params {
    heads: u32,     // query heads
    kv_heads: u32,
    quads: u32,     // D / 4
    rotary: u32,    // quads of a head that are rotated
    q_first: u32,
    q_stride: u32,
    k_first: u32,
    k_stride: u32,
    v_first: u32,
    v_stride: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;               // [tokens, q_stride]
@group(0) @binding(1) var<storage, read> k: array<vec4<f32>>;               // [tokens, k_stride]
@group(0) @binding(2) var<storage, read> v: array<vec4<f32>>;               // [tokens, v_stride]
@group(0) @binding(3) var<storage, read> q_norm: array<vec4<f32>>;          // [quads]
@group(0) @binding(4) var<storage, read> k_norm: array<vec4<f32>>;          // [quads]
@group(0) @binding(5) var<storage, read> batch: array<vec4<u32>>;           // [1 + tokens]
@group(0) @binding(6) var<storage, read> table: array<vec4<f32>>;           // [rows, rotary] of (cos, sin, cos, sin)
@group(0) @binding(7) var<storage, read_write> out: array<vec4<f32>>;       // [tokens, heads, quads]
@group(0) @binding(8) var<storage, read_write> k_cache: array<cache_quad>;  // [pool rows, kv_heads, quads]
@group(0) @binding(9) var<storage, read_write> v_cache: array<cache_quad>;  // [pool rows, kv_heads, quads]
@group(0) @binding(10) var<uniform> params: Params;

// What is needed of a quad of a head: its values, the same weighted, those that are rotated with them, weighted, and by what.
struct Quad {
    raw: vec4<f32>,
    own: vec4<f32>,
    mate: vec4<f32>,
    turn: Turn,
}

// Quad i of a head that starts at `first`.
fn quad_at(queries: bool, first: u32, i: u32, position: u32) -> Quad {
    let raw = head_quad(queries, first + i);
    let own = raw * head_weight(queries, i);
    if (INTERLEAVED || i >= params.rotary) {
        return Quad(raw, own, own, turn_at(position, min(i, params.rotary - 1u)));
    }
    let mate = partner(i);
    return Quad(raw, own, head_quad(queries, first + mate) * head_weight(queries, mate), turn_at(position, i));
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let heads = params.heads + 2u * params.kv_heads;
    let head = index % heads;
    let token = index / heads;
    if (token >= batch_rows()) {
        return;
    }
    let record = batch_row(token);
    let pool_rows = min(arrayLength(&k_cache), arrayLength(&v_cache)) / (params.kv_heads * params.quads);
    let there = record.slot < pool_rows;
    if (head >= params.heads + params.kv_heads) {
        let h = head - params.heads - params.kv_heads;
        let first = token * params.v_stride + params.v_first + h * params.quads;
        for (var i = lane; there && i < params.quads; i = i + WG) {
            v_cache[(record.slot * params.kv_heads + h) * params.quads + i] = cache_pack(v[first + i]);
        }
        return;
    }
    let queries = head < params.heads;
    let h = select(head - params.heads, head, queries);
    let first = h * params.quads + select(
        token * params.k_stride + params.k_first, token * params.q_stride + params.q_first, queries,
    );
    let position = min(record.position, arrayLength(&table) / params.rotary - 1u);
    // All of the first quad is asked for before the sum over the head: each trip to memory takes as long as the rest.
    let early = quad_at(queries, first, min(lane, params.quads - 1u), position);
    var squares = select(0.0, dot(early.raw, early.raw), lane < params.quads);
    for (var i = lane + WG; i < params.quads; i = i + WG) {
        let x = head_quad(queries, first + i);
        squares = squares + dot(x, x);
    }
    let factor = inverseSqrt(workgroup_sum(squares, lane) / f32(4u * params.quads) + params.eps);
    for (var i = lane; i < params.quads; i = i + WG) {
        var quad = early;
        if (i >= WG) {
            quad = quad_at(queries, first, i, position);
        }
        var value = factor * quad.own;
        if (i < params.rotary) {
            value = rotate(value, factor * quad.mate, quad.turn, i);
        }
        if (queries) {
            out[(token * params.heads + h) * params.quads + i] = value;
        } else if (there) {
            k_cache[(record.slot * params.kv_heads + h) * params.quads + i] = cache_pack(value);
        }
    }
}
