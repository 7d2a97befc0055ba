// out[first + s, h, d] = Σ_c scores[h, s, c] · v_cache[c, h / group, d]
// The baseline: a thread owns one value of a head and reads it from four cache rows at a time. f32 cache.
// Grid: one thread per value of out, folded.

const WG: u32 = 64u;

@group(0) @binding(0) var<storage, read> scores: array<f32>;             // [heads, rows, stride], after softmax
@group(0) @binding(1) var<storage, read> v_cache: array<cache_quad>;     // [pool rows, kv_heads, quads]
@group(0) @binding(2) var<storage, read> batch: array<vec4<u32>>;       // [1 + tokens], consecutive rows of one sequence
@group(0) @binding(3) var<storage, read_write> out: array<f32>;          // [tokens, heads, 4 · quads]; lanes write them one by one
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let width = params.quads * 4u;
    let d = index % width;
    let h = (index / width) % params.heads;
    let s = index / (width * params.heads);
    if (s >= params.rows) {
        return;
    }
    let stride = params.kv_heads * params.quads;
    let column = h / (params.heads / params.kv_heads) * params.quads + d / 4u;
    let base = (h * params.rows + s) * params.stride;
    let visible = first_position() + s + 1u;
    let lane_of_quad = d % 4u;
    var total = 0.0;
    var c = 0u;
    for (; c + 4u <= visible; c = c + 4u) {
        let i = c * stride + column;
        let a = vec4<f32>(scores[base + c], scores[base + c + 1u], scores[base + c + 2u], scores[base + c + 3u]);
        let values = vec4<f32>(
            v_cache[i][lane_of_quad],
            v_cache[i + stride][lane_of_quad],
            v_cache[i + 2u * stride][lane_of_quad],
            v_cache[i + 3u * stride][lane_of_quad],
        );
        total = total + dot(a, values);
    }
    for (; c < visible; c = c + 1u) {
        total = total + scores[base + c] * v_cache[c * stride + column][lane_of_quad];
    }
    out[((params.first + s) * params.heads + h) * width + d] = total;
}
