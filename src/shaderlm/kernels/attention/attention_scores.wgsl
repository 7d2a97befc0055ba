// scores[h, s, c] = scale · Σ_d q[first + s, h, d] · k_cache[c, h / group, d]
// A thread serves four queries with each key it reads. Keys that none of the four may see are left alone: the
// softmax masks by position. Grid: one thread per (h, four queries, c), c fastest, folded.

const WG: u32 = 64u;

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;            // [tokens, heads, quads]
@group(0) @binding(1) var<storage, read> k_cache: array<cache_quad>;     // [pool rows, kv_heads, quads]
@group(0) @binding(2) var<storage, read> batch: array<vec4<u32>>;       // [1 + tokens], consecutive rows of one sequence
@group(0) @binding(3) var<storage, read_write> scores: array<f32>;       // [heads, rows, stride]
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let tiles = (params.rows + 3u) / 4u;
    let c = index % params.stride;
    let s = (index / params.stride) % tiles * 4u;
    let h = index / (params.stride * tiles);
    let last = min(s + 3u, params.rows - 1u);
    if (h >= params.heads || c > first_position() + last) {
        return;
    }
    let group_size = params.heads / params.kv_heads;
    let key = (c * params.kv_heads + h / group_size) * params.quads;
    // Queries past the end are the last one again, and are not stored.
    let query = (min(vec4<u32>(s, s + 1u, s + 2u, s + 3u), vec4<u32>(params.rows - 1u)) + params.first)
        * params.heads * params.quads + h * params.quads;
    var sums = vec4<f32>();
    for (var d = 0u; d < params.quads; d = d + 1u) {
        let k4 = cache_load(k_cache[key + d]);
        sums = sums + vec4<f32>(
            dot(q[query.x + d], k4), dot(q[query.y + d], k4), dot(q[query.z + d], k4), dot(q[query.w + d], k4),
        );
    }
    for (var i = 0u; i < 4u; i = i + 1u) {
        if (s + i < params.rows) {
            scores[(h * params.rows + s + i) * params.stride + c] = sums[i] * params.scale;
        }
    }
}
