// out[t, h, :] = Σ_c exp(score_c − m) · v[c] / Σ_c exp(score_c − m), score_c = scale · q[t, h] · k[c], m = max score
// over the keys c up to position + reach of row t, of a window from position − WINDOW + 1 on: rows of an image see all of
// it. A thread has one row and head, and goes through its keys one after the other.
// Grid: one thread per row and query head, folded; rows of a head are side by side, and mostly read the same keys.

const WG: u32 = 64u;
const QUADS: u32 = 16u;       // D / 4
const IMAGE_WORDS: u32 = 8u;  // of a record of image_rows, and the place of
const REACH: u32 = 3u;        // keys after its own that a row sees

struct Params {
    tokens: u32,
    heads: u32,
    kv_heads: u32,
    scale: f32,
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;          // [tokens, heads, QUADS]
@group(0) @binding(1) var<storage, read> k_cache: array<cache_quad>;   // [pool rows, kv_heads, QUADS]
@group(0) @binding(2) var<storage, read> v_cache: array<cache_quad>;   // [pool rows, kv_heads, QUADS]
@group(0) @binding(3) var<storage, read> batch: array<vec4<u32>>;      // [1 + tokens]
@group(0) @binding(4) var<storage, read> image_rows: array<u32>;       // [tokens, 8]
@group(0) @binding(5) var<storage, read_write> out: array<vec4<f32>>;  // [tokens, heads, QUADS]
@group(0) @binding(6) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let head = index / params.tokens;
    let t = index % params.tokens;
    if (head >= params.heads || t >= batch_rows()) {
        return;
    }
    let record = batch_row(t);
    let kv_head = head / (params.heads / params.kv_heads);
    let last = min(record.position + image_rows[t * IMAGE_WORDS + REACH], pool_rows() - 1u);
    var row: array<vec4<f32>, QUADS>;
    var sums: array<vec4<f32>, QUADS>;
    for (var d = 0u; d < QUADS; d = d + 1u) {
        row[d] = q[(t * params.heads + head) * QUADS + d] * params.scale;
        sums[d] = vec4<f32>();
    }
    var top = -3.4e38;
    var total = 0.0;
    for (var c = first_key(record.position); c <= last; c = c + 1u) {
        let at = (pool_row(record.pages, c) * params.kv_heads + kv_head) * QUADS;
        var product = vec4<f32>();
        for (var d = 0u; d < QUADS; d = d + 1u) {
            product = product + row[d] * cache_load(k_cache[at + d]);
        }
        let score = capped(product.x + product.y + product.z + product.w);
        let largest = max(top, score);
        let kept = exp(top - largest);
        let power = exp(score - largest);
        top = largest;
        total = total * kept + power;
        for (var d = 0u; d < QUADS; d = d + 1u) {
            sums[d] = sums[d] * kept + power * cache_load(v_cache[at + d]);
        }
    }
    for (var d = 0u; d < QUADS; d = d + 1u) {
        out[(t * params.heads + head) * QUADS + d] = sums[d] / total;
    }
}
