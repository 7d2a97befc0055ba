// out[t, h, :] = Σ_c exp(score_c − m) · v[c, h, :] / Σ_c exp(score_c − m), score_c = scale · q[t, h] · k[c, h], m the largest
// over the rows c of the span of row t, in both directions. A thread has one row of q and its sums; keys and values are
// staged KEYS at a time, for WG rows of one head. Spans rise from row to row.
// Grid: one workgroup per (WG rows, head), folded. Needs D a multiple of four.

const WG: u32 = 64u;
const KEYS: u32 = 16u;
const QUADS: u32 = 16u;  // D / 4

struct Params {
    tokens: u32,
    heads: u32,
    scale: f32,
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;          // [tokens, heads, QUADS]
@group(0) @binding(1) var<storage, read> k: array<vec4<f32>>;          // [tokens, heads, QUADS]
@group(0) @binding(2) var<storage, read> v: array<vec4<f32>>;          // [tokens, heads, QUADS]
@group(0) @binding(3) var<storage, read> spans: array<vec2<u32>>;      // [tokens]: the first row, and the one after the last
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;  // [tokens, heads, QUADS]
@group(0) @binding(5) var<uniform> params: Params;

var<workgroup> keys: array<vec4<f32>, KEYS * QUADS>;
var<workgroup> values: array<vec4<f32>, KEYS * QUADS>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let head = index % params.heads;
    let tile = index / params.heads * WG;
    if (tile >= params.tokens) {
        return;
    }
    let t = min(tile + lane, params.tokens - 1u);
    let span = min(spans[t], vec2<u32>(params.tokens));
    let begin = spans[tile].x;
    let end = min(spans[min(tile + WG, params.tokens) - 1u].y, params.tokens);
    var row: array<vec4<f32>, QUADS>;
    var sums: array<vec4<f32>, QUADS>;
    for (var d = 0u; d < QUADS; d = d + 1u) {
        row[d] = q[(t * params.heads + head) * QUADS + d] * params.scale;
        sums[d] = vec4<f32>();
    }
    var top = -3.4e38;
    var total = 0.0;
    for (var first = begin; first < end; first = first + KEYS) {
        workgroupBarrier();
        for (var i = lane; i < KEYS * QUADS; i = i + WG) {
            let at = (min(first + i / QUADS, params.tokens - 1u) * params.heads + head) * QUADS + i % QUADS;
            keys[i] = k[at];
            values[i] = v[at];
        }
        workgroupBarrier();
        var scores: array<f32, KEYS>;
        var largest = top;
        for (var c = 0u; c < KEYS; c = c + 1u) {
            var product = vec4<f32>();
            for (var d = 0u; d < QUADS; d = d + 1u) {
                product = product + row[d] * keys[c * QUADS + d];
            }
            let seen = first + c >= span.x && first + c < span.y;
            scores[c] = select(-3.4e38, product.x + product.y + product.z + product.w, seen);
            largest = max(largest, scores[c]);
        }
        let kept = exp(top - largest);
        top = largest;
        total = total * kept;
        for (var d = 0u; d < QUADS; d = d + 1u) {
            sums[d] = sums[d] * kept;
        }
        for (var c = 0u; c < KEYS; c = c + 1u) {
            let seen = first + c >= span.x && first + c < span.y;
            let power = select(0.0, exp(scores[c] - top), seen);
            total = total + power;
            for (var d = 0u; d < QUADS; d = d + 1u) {
                sums[d] = sums[d] + power * values[c * QUADS + d];
            }
        }
    }
    if (tile + lane < params.tokens) {
        let inverse = select(0.0, 1.0 / total, total > 0.0);
        for (var d = 0u; d < QUADS; d = d + 1u) {
            out[(t * params.heads + head) * QUADS + d] = sums[d] * inverse;
        }
    }
}
