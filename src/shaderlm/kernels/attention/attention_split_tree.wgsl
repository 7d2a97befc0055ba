// For each row t, split of its keys and query head h, over the keys c of the split that the row sees
//   stats[t, h, split] = (m, l) = (max_c score, Σ_c exp(score − m));  partial[t, h, split, d] = Σ_c exp(score − m) · v[c, d]
// attention_split for devices without subgroups: maxima and sums are made by trees in workgroup memory. A workgroup owns one
// kv head and one split of a row's keys, a chunk of at most KEYS or several, and takes the GROUP query heads of it four at
// a time. Loads are issued four at a time before the first is used.
// Grid: one workgroup per (row, kv head, split), folded; with a smaller one, of whole rows, each takes every so many-th row.
// Needs QUADS ≤ WG, KEYS ≤ WG, KEYS a power of two. attention_merge joins the splits.

const WG: u32 = 128u;
const KEYS: u32 = 128u;
const GROUP: u32 = 4u;   // query heads per kv head
const QUADS: u32 = 16u;  // D / 4
const KEYS_AT_ONCE: u32 = WG / QUADS;

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;              // [tokens, kv_heads · GROUP, QUADS]
@group(0) @binding(1) var<storage, read> k_cache: array<cache_quad>;       // [pool rows, kv_heads, QUADS]
@group(0) @binding(2) var<storage, read> v_cache: array<cache_quad>;       // [pool rows, kv_heads, QUADS]
@group(0) @binding(3) var<storage, read> batch: array<vec4<u32>>;          // [1 + tokens]
@group(0) @binding(4) var<storage, read_write> partial: array<vec4<f32>>;  // [rows, kv_heads · GROUP, splits, QUADS]
@group(0) @binding(5) var<storage, read_write> stats: array<vec2<f32>>;    // [rows, kv_heads · GROUP, splits]
@group(0) @binding(6) var<uniform> params: Params;

var<workgroup> quads: array<vec4<f32>, 4u * WG>;     // queries of four heads; then sums of values
var<workgroup> pieces: array<vec4<f32>, WG>;         // of scores, and the trees
var<workgroup> weights: array<vec4<f32>, KEYS>;      // scores of four heads, then their powers

// Scores of one key quad against four heads.
fn head_dots(d: u32, k4: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(
        dot(quads[d], k4), dot(quads[d + QUADS], k4), dot(quads[d + 2u * QUADS], k4), dot(quads[d + 3u * QUADS], k4),
    );
}

// Scores of the chunk's keys, −3.4e38 of those that are not seen: four lanes share a key, each takes every fourth quad of it.
fn score_keys(start: u32, count: u32, kv_head: u32, lane: u32) {
    let part = lane % 4u;
    for (var first = 0u; first < KEYS; first = first + WG / 4u) {
        let c = first + lane / 4u;
        var sums = vec4<f32>();
        for (var d = part; d < QUADS; d = d + 16u) {
            let key = load_key(start + min(c, count - 1u), kv_head, d);
            sums = sums + head_dots(d, cache_load(key.a));
            if (d + 4u < QUADS) {
                sums = sums + head_dots(d + 4u, cache_load(key.b));
            }
            if (d + 8u < QUADS) {
                sums = sums + head_dots(d + 8u, cache_load(key.c));
            }
            if (d + 12u < QUADS) {
                sums = sums + head_dots(d + 12u, cache_load(key.d));
            }
        }
        pieces[lane] = sums;
        workgroupBarrier();
        if (part == 0u && c < KEYS) {
            let score = pieces[lane] + pieces[lane + 1u] + pieces[lane + 2u] + pieces[lane + 3u];
            weights[c] = select(vec4<f32>(-3.4e38), capped4(score), c < count && within(c));
        }
        workgroupBarrier();
    }
}

// The largest of KEYS vectors, by component.
fn tree_max(value: vec4<f32>, lane: u32) -> vec4<f32> {
    pieces[lane] = value;
    workgroupBarrier();
    for (var width = KEYS / 2u; width > 0u; width = width / 2u) {
        if (lane < width) {
            pieces[lane] = max(pieces[lane], pieces[lane + width]);
        }
        workgroupBarrier();
    }
    let largest = pieces[0];
    workgroupBarrier();
    return largest;
}

fn tree_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    pieces[lane] = value;
    workgroupBarrier();
    for (var width = KEYS / 2u; width > 0u; width = width / 2u) {
        if (lane < width) {
            pieces[lane] = pieces[lane] + pieces[lane + width];
        }
        workgroupBarrier();
    }
    let total = pieces[0];
    workgroupBarrier();
    return total;
}

var<private> sum0: vec4<f32>;  // of values, for each of four heads
var<private> sum1: vec4<f32>;
var<private> sum2: vec4<f32>;
var<private> sum3: vec4<f32>;

// QUADS lanes read a row side by side, KEYS_AT_ONCE rows at a time. Keys past the end have the weight 0.
fn add_values(start: u32, count: u32, kv_head: u32, lane: u32) {
    let last = count - 1u;
    for (var c = lane / QUADS; c < count; c = c + 4u * KEYS_AT_ONCE) {
        let keys = vec4<u32>(c, c + KEYS_AT_ONCE, c + 2u * KEYS_AT_ONCE, c + 3u * KEYS_AT_ONCE);
        let values = value_quads(kv_head * QUADS + lane % QUADS, start + min(keys, vec4<u32>(last)));
        let w0 = weights[c];
        let w1 = select(vec4<f32>(), weights[min(keys.y, last)], keys.y < count);
        let w2 = select(vec4<f32>(), weights[min(keys.z, last)], keys.z < count);
        let w3 = select(vec4<f32>(), weights[min(keys.w, last)], keys.w < count);
        let v0 = select(vec4<f32>(), cache_load(values.a), within(keys.x));
        let v1 = select(vec4<f32>(), cache_load(values.b), within(keys.y));
        let v2 = select(vec4<f32>(), cache_load(values.c), within(keys.z));
        let v3 = select(vec4<f32>(), cache_load(values.d), within(keys.w));
        sum0 = sum0 + w0.x * v0 + w1.x * v1 + w2.x * v2 + w3.x * v3;
        sum1 = sum1 + w0.y * v0 + w1.y * v1 + w2.y * v2 + w3.y * v3;
        sum2 = sum2 + w0.z * v0 + w1.z * v1 + w2.z * v2 + w3.z * v3;
        sum3 = sum3 + w0.w * v0 + w1.w * v1 + w2.w * v2 + w3.w * v3;
    }
}

fn attend_split(t: u32, kv_head: u32, split: u32, lane: u32) {
    let row = batch_row(t);
    let begin = first_chunk(last_key(row));
    let length = last_key(row) + 1u - begin;
    let chunk = chunk_keys(length);
    let first = split * chunks_per_split(length) * chunk;
    if (first >= length) {
        return;
    }
    let end_of_split = min(first + chunks_per_split(length) * chunk, length);
    let base = (t * params.kv_heads + kv_head) * GROUP;
    let stored = ((t - params.first) * params.kv_heads + kv_head) * GROUP;

    for (var i = 0u; i < GROUP; i = i + 4u) {
        for (var j = lane; j < 4u * QUADS; j = j + WG) {
            let head = i + j / QUADS;
            let value = q[(base + min(head, GROUP - 1u)) * QUADS + j % QUADS] * params.scale;
            quads[j] = select(vec4<f32>(), value, head < GROUP);
        }
        sum0 = vec4<f32>();
        sum1 = vec4<f32>();
        sum2 = vec4<f32>();
        sum3 = vec4<f32>();
        var largest = vec4<f32>(-3.4e38);
        var total = vec4<f32>();
        workgroupBarrier();
        for (var at = first; at < end_of_split; at = at + chunk) {
            let count = min(chunk, length - at);
            let start = pool_row(row.pages, begin + at);
            hidden = hidden_keys(last_key(row), begin + at);
            score_keys(start, count, kv_head, lane);
            let own = weights[min(lane, KEYS - 1u)];
            let before = largest;
            largest = max(before, tree_max(own, lane));
            let e = select(vec4<f32>(), exp(own - largest), lane < count && within(lane));
            if (lane < KEYS) {
                weights[lane] = e;
            }
            let kept = exp(before - largest);
            total = total * kept + tree_sum(e, lane);
            sum0 = sum0 * kept.x;
            sum1 = sum1 * kept.y;
            sum2 = sum2 * kept.z;
            sum3 = sum3 * kept.w;
            if (lane / QUADS < KEYS_AT_ONCE) {
                add_values(start, count, kv_head, lane);
            }
            workgroupBarrier();  // the weights have been read
        }
        quads[lane] = sum0;
        quads[WG + lane] = sum1;
        quads[2u * WG + lane] = sum2;
        quads[3u * WG + lane] = sum3;
        workgroupBarrier();
        for (var j = lane; j < 4u * QUADS; j = j + WG) {
            let head = i + j / QUADS;
            if (head < GROUP) {
                var value = vec4<f32>();
                for (var k = 0u; k < KEYS_AT_ONCE; k = k + 1u) {
                    value = value + quads[j / QUADS * WG + k * QUADS + j % QUADS];
                }
                partial[((stored + head) * params.splits + split) * QUADS + j % QUADS] = value;
            }
        }
        let head = i + lane;
        if (lane < 4u && head < GROUP) {
            stats[(stored + head) * params.splits + split] = vec2<f32>(largest[lane], total[lane]);
        }
        workgroupBarrier();  // quads may be written again
    }
}
