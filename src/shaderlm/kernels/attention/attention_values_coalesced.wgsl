// out[first + s, h, d] = Σ_c scores[h, s, c] · v_cache[c, h / group, d]
// A thread owns four neighbouring values of a head and reads them from one cache row at a time: one load where
// the strided route makes four. Grid: one thread per four values of out, folded.

const WG: u32 = 64u;

struct Params {
    rows: u32,      // queries of this dispatch
    first: u32,     // the first of them in q and out
    context: u32,   // keys that the last of them sees
    pos: u32,
    heads: u32,     // query heads
    kv_heads: u32,
    quads: u32,     // D / 4
    scale: f32,
}

@group(0) @binding(0) var<storage, read> scores: array<f32>;             // [heads, rows, context], after softmax
@group(0) @binding(1) var<storage, read> v_cache: array<cache_quad>;     // [C, kv_heads, quads]
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;  // [S, heads, quads]
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let d = index % params.quads;
    let h = (index / params.quads) % params.heads;
    let s = index / (params.quads * params.heads);
    if (s >= params.rows) {
        return;
    }
    let stride = params.kv_heads * params.quads;
    let column = h / (params.heads / params.kv_heads) * params.quads + d;
    let base = (h * params.rows + s) * params.context;
    let visible = min(params.pos + params.first + s + 1u, params.context);
    var total = vec4<f32>();
    for (var c = 0u; c < visible; c = c + 1u) {
        total = total + scores[base + c] * cache_load(v_cache[c * stride + column]);
    }
    out[((params.first + s) * params.heads + h) * params.quads + d] = total;
}
