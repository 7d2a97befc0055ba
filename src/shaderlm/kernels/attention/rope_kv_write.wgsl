// out[t, h] = rotate(q[t, h]);  k_cache[slot of row t, h] = rotate(k[t, h]);  v_cache[slot of row t] = v[t]
// rotate: (u, v) → (u·cos − v·sin, u·sin + v·cos) for pairs of a head: 2i and 2i + 1 if interleaved, else i and
// i + rotary / 2; elements past `rotary` are copied. cos and sin are those of the row's position. q, k and v may be
// columns of one matrix: a row of each starts `first` quads into a row of `stride` quads. A slot outside the pool, which
// NONE is, takes nothing.
// rotate is included.
// Grid: one thread per four values of q, k and v, folded. Needs D % 4 == 0, and rotary % 8 == 0 (interleaved: % 4).

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
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;               // [tokens, q_stride]
@group(0) @binding(1) var<storage, read> k: array<vec4<f32>>;               // [tokens, k_stride]
@group(0) @binding(2) var<storage, read> v: array<vec4<f32>>;               // [tokens, v_stride]
@group(0) @binding(3) var<storage, read> batch: array<vec4<u32>>;           // [1 + tokens]
@group(0) @binding(4) var<storage, read> table: array<vec4<f32>>;           // [rows, rotary] of (cos, sin, cos, sin)
@group(0) @binding(5) var<storage, read_write> out: array<vec4<f32>>;       // [tokens, heads, quads]
@group(0) @binding(6) var<storage, read_write> k_cache: array<cache_quad>;  // [pool rows, kv_heads, quads]
@group(0) @binding(7) var<storage, read_write> v_cache: array<cache_quad>;  // [pool rows, kv_heads, quads]
@group(0) @binding(8) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let heads = params.heads + 2u * params.kv_heads;
    let i = index % params.quads;
    let head = index / params.quads % heads;
    let token = index / (params.quads * heads);
    if (token >= batch_rows()) {
        return;
    }
    let record = batch_row(token);
    let position = min(record.position, arrayLength(&table) / params.rotary - 1u);
    let pool_rows = min(arrayLength(&k_cache), arrayLength(&v_cache)) / (params.kv_heads * params.quads);
    let turned = i < params.rotary;
    let mate = select(i, partner(i), turned && !INTERLEAVED);
    if (head < params.heads) {
        let row = token * params.q_stride + params.q_first + head * params.quads;
        var value = q[row + i];
        if (turned) {
            value = rotate(value, q[row + mate], turn_at(position, i), i);
        }
        out[(token * params.heads + head) * params.quads + i] = value;
    } else if (record.slot >= pool_rows) {
        return;
    } else if (head < params.heads + params.kv_heads) {
        let h = head - params.heads;
        let row = token * params.k_stride + params.k_first + h * params.quads;
        var value = k[row + i];
        if (turned) {
            value = rotate(value, k[row + mate], turn_at(position, i), i);
        }
        k_cache[(record.slot * params.kv_heads + h) * params.quads + i] = cache_pack(value);
    } else {
        let h = head - params.heads - params.kv_heads;
        let value = v[token * params.v_stride + params.v_first + h * params.quads + i];
        v_cache[(record.slot * params.kv_heads + h) * params.quads + i] = cache_pack(value);
    }
}
