// out[first + s, h, d] = Σ_c scores[h, s, c] · v_cache[c, h / group, d]
// A workgroup owns 8 rows of one kv head: neighbouring queries, and all query heads that share the kv head. QUADS
// lanes read a cache row side by side, four rows in flight, and each row read serves all 8; SLICES such groups of
// lanes share the context and add up at the end.
// Grid: one workgroup per (kv head, 8 rows), folded. Needs QUADS ≤ WG.

const WG: u32 = 64u;
const QUADS: u32 = 16u;  // D / 4
const SLICES: u32 = WG / QUADS;

@group(0) @binding(0) var<storage, read> scores: array<vec4<f32>>;       // [heads, rows, stride / 4], after softmax
@group(0) @binding(1) var<storage, read> v_cache: array<cache_quad>;     // [pool rows, kv_heads, quads]
@group(0) @binding(2) var<storage, read> batch: array<vec4<u32>>;       // [1 + tokens], consecutive rows of one sequence
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;    // [tokens, heads, quads]
@group(0) @binding(4) var<uniform> params: Params;

var<workgroup> slice_sums: array<vec4<f32>, 8u * WG>;

fn weighted(a: vec4<f32>, v0: vec4<f32>, v1: vec4<f32>, v2: vec4<f32>, v3: vec4<f32>) -> vec4<f32> {
    return a.x * v0 + a.y * v1 + a.z * v2 + a.w * v3;
}

// Where the weights of a row start: row r of a kv head is query r / group of its head r % group.
fn weights_of(kv_head: u32, r: u32) -> u32 {
    let group = params.heads / params.kv_heads;
    let row = min(r, params.rows * group - 1u);
    return ((kv_head * group + row % group) * params.rows + row / group) * params.stride / 4u;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let group = params.heads / params.kv_heads;
    let tiles = (params.rows * group + 7u) / 8u;
    let index = group_id.x + group_id.y * groups.x;
    let kv_head = index / tiles;
    if (kv_head >= params.kv_heads) {
        return;
    }
    let r = index % tiles * 8u;
    let last_query = min((r + 7u) / group, params.rows - 1u);
    // What the last query sees. Past what another sees its weights are 0.
    let visible = first_position() + last_query + 1u;
    let last = visible - 1u;
    let stride = params.kv_heads * QUADS;
    let column = kv_head * QUADS + lane % QUADS;
    let row0 = weights_of(kv_head, r);
    let row1 = weights_of(kv_head, r + 1u);
    let row2 = weights_of(kv_head, r + 2u);
    let row3 = weights_of(kv_head, r + 3u);
    let row4 = weights_of(kv_head, r + 4u);
    let row5 = weights_of(kv_head, r + 5u);
    let row6 = weights_of(kv_head, r + 6u);
    let row7 = weights_of(kv_head, r + 7u);
    var sum0 = vec4<f32>();
    var sum1 = vec4<f32>();
    var sum2 = vec4<f32>();
    var sum3 = vec4<f32>();
    var sum4 = vec4<f32>();
    var sum5 = vec4<f32>();
    var sum6 = vec4<f32>();
    var sum7 = vec4<f32>();
    if (lane / QUADS < SLICES) {
        for (var c = lane / QUADS * 4u; c < visible; c = c + 4u * SLICES) {
            // Cache rows past the end are the last one again; their weights are 0.
            let v0 = cache_load(v_cache[c * stride + column]);
            let v1 = cache_load(v_cache[min(c + 1u, last) * stride + column]);
            let v2 = cache_load(v_cache[min(c + 2u, last) * stride + column]);
            let v3 = cache_load(v_cache[min(c + 3u, last) * stride + column]);
            let at = c / 4u;
            sum0 = sum0 + weighted(scores[row0 + at], v0, v1, v2, v3);
            sum1 = sum1 + weighted(scores[row1 + at], v0, v1, v2, v3);
            sum2 = sum2 + weighted(scores[row2 + at], v0, v1, v2, v3);
            sum3 = sum3 + weighted(scores[row3 + at], v0, v1, v2, v3);
            sum4 = sum4 + weighted(scores[row4 + at], v0, v1, v2, v3);
            sum5 = sum5 + weighted(scores[row5 + at], v0, v1, v2, v3);
            sum6 = sum6 + weighted(scores[row6 + at], v0, v1, v2, v3);
            sum7 = sum7 + weighted(scores[row7 + at], v0, v1, v2, v3);
        }
    }
    slice_sums[lane] = sum0;
    slice_sums[WG + lane] = sum1;
    slice_sums[2u * WG + lane] = sum2;
    slice_sums[3u * WG + lane] = sum3;
    slice_sums[4u * WG + lane] = sum4;
    slice_sums[5u * WG + lane] = sum5;
    slice_sums[6u * WG + lane] = sum6;
    slice_sums[7u * WG + lane] = sum7;
    workgroupBarrier();
    for (var j = lane; j < 8u * QUADS; j = j + WG) {
        let row = r + j / QUADS;
        if (row < params.rows * group) {
            var total = vec4<f32>();
            for (var i = 0u; i < SLICES; i = i + 1u) {
                total = total + slice_sums[j / QUADS * WG + i * QUADS + j % QUADS];
            }
            let head = kv_head * group + row % group;
            out[((params.first + row / group) * params.heads + head) * QUADS + j % QUADS] = total;
        }
    }
}
