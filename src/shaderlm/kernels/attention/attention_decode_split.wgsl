// One query: for each chunk of keys, per query head h
//   stats[h, split] = (m, l) = (max_c score, Σ_c exp(score − m));  partial[h, split, d] = Σ_c exp(score − m) · v[c, d]
// A workgroup owns one kv head and one chunk of KEYS keys: a K or V row is read once for every four of its GROUP query
// heads. Heads are kept four to a vector, H4 vectors. Loads are issued four at a time before the first is used:
// one after the other they would each wait a full trip to memory.
// Grid: one workgroup per (kv head, split), folded. Needs QUADS ≤ WG. attention_decode_merge joins the splits.

const WG: u32 = 128u;
const KEYS: u32 = 64u;
const GROUP: u32 = 4u;   // query heads per kv head
const H4: u32 = 1u;      // ceil(GROUP / 4)
const QUADS: u32 = 16u;  // D / 4
const TEAMS: u32 = WG / QUADS;

struct Params {
    splits: u32,  // that there is room for in partial and stats
    kv_heads: u32,
    scale: f32,
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;              // [1, kv_heads · GROUP, QUADS]
@group(0) @binding(1) var<storage, read> k_cache: array<cache_quad>;       // [C, kv_heads, QUADS]
@group(0) @binding(2) var<storage, read> v_cache: array<cache_quad>;       // [C, kv_heads, QUADS]
@group(0) @binding(3) var<storage, read> positions: array<u32>;            // [1], where the query stands
@group(0) @binding(4) var<storage, read_write> partial: array<vec4<f32>>;  // [kv_heads · GROUP, splits, QUADS]
@group(0) @binding(5) var<storage, read_write> stats: array<vec2<f32>>;    // [kv_heads · GROUP, splits]
@group(0) @binding(6) var<uniform> params: Params;

var<workgroup> q_tile: array<vec4<f32>, 4u * H4 * QUADS>;
var<workgroup> pieces: array<vec4<f32>, 4u * WG>;         // of scores, then of values
var<workgroup> weights: array<vec4<f32>, H4 * KEYS>;

// Scores of one key quad against the four heads of vector i.
fn head_dots(i: u32, d: u32, k4: vec4<f32>) -> vec4<f32> {
    let at = 4u * i * QUADS + d;
    return vec4<f32>(
        dot(q_tile[at], k4), dot(q_tile[at + QUADS], k4), dot(q_tile[at + 2u * QUADS], k4), dot(q_tile[at + 3u * QUADS], k4),
    );
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let kv_head = index / params.splits;
    let split = index % params.splits;
    let context = positions[0] + 1u;
    let first = split * KEYS;
    if (kv_head >= params.kv_heads || first >= context) {
        return;
    }
    let count = min(KEYS, context - first);
    let row_quads = params.kv_heads * QUADS;
    let base = first * row_quads + kv_head * QUADS;

    for (var i = lane; i < 4u * H4 * QUADS; i = i + WG) {
        var value = vec4<f32>();
        if (i < GROUP * QUADS) {
            value = q[kv_head * GROUP * QUADS + i] * params.scale;
        }
        q_tile[i] = value;
    }
    workgroupBarrier();

    // Scores: four lanes share a key, each takes every fourth quad of it.
    let part = lane % 4u;
    for (var first_key = 0u; first_key < KEYS; first_key = first_key + WG / 4u) {
        let key = first_key + lane / 4u;
        let row = base + min(key, count - 1u) * row_quads;
        for (var i = 0u; i < H4; i = i + 1u) {
            var sums = vec4<f32>();
            for (var d = part; d < QUADS; d = d + 16u) {
                let k0 = cache_load(k_cache[row + d]);
                let k1 = cache_load(k_cache[row + min(d + 4u, QUADS - 1u)]);
                let k2 = cache_load(k_cache[row + min(d + 8u, QUADS - 1u)]);
                let k3 = cache_load(k_cache[row + min(d + 12u, QUADS - 1u)]);
                sums = sums + head_dots(i, d, k0);
                if (d + 4u < QUADS) {
                    sums = sums + head_dots(i, d + 4u, k1);
                }
                if (d + 8u < QUADS) {
                    sums = sums + head_dots(i, d + 8u, k2);
                }
                if (d + 12u < QUADS) {
                    sums = sums + head_dots(i, d + 12u, k3);
                }
            }
            pieces[lane] = sums;
            workgroupBarrier();
            if (part == 0u && key < KEYS) {
                let score = pieces[lane] + pieces[lane + 1u] + pieces[lane + 2u] + pieces[lane + 3u];
                weights[i * KEYS + key] = select(vec4<f32>(-3.4e38), score, key < count);
            }
            workgroupBarrier();
        }
    }

    // Softmax over the chunk, four heads at once.
    for (var i = 0u; i < H4; i = i + 1u) {
        if (lane < KEYS) {
            pieces[lane] = weights[i * KEYS + lane];
        }
        workgroupBarrier();
        for (var width = KEYS / 2u; width > 0u; width = width / 2u) {
            if (lane < width) {
                pieces[lane] = max(pieces[lane], pieces[lane + width]);
            }
            workgroupBarrier();
        }
        let top = pieces[0];
        workgroupBarrier();
        if (lane < KEYS) {
            let e = select(vec4<f32>(), exp(weights[i * KEYS + lane] - top), lane < count);
            weights[i * KEYS + lane] = e;
            pieces[lane] = e;
        }
        workgroupBarrier();
        for (var width = KEYS / 2u; width > 0u; width = width / 2u) {
            if (lane < width) {
                pieces[lane] = pieces[lane] + pieces[lane + width];
            }
            workgroupBarrier();
        }
        let head = 4u * i + lane;
        if (lane < 4u && head < GROUP) {
            stats[(kv_head * GROUP + head) * params.splits + split] = vec2<f32>(top[lane], pieces[0][lane]);
        }
        workgroupBarrier();
    }

    // Values: QUADS lanes read a row side by side, TEAMS rows at a time.
    let team = lane / QUADS;
    let column = base + lane % QUADS;
    for (var i = 0u; i < H4; i = i + 1u) {
        var sum0 = vec4<f32>();
        var sum1 = vec4<f32>();
        var sum2 = vec4<f32>();
        var sum3 = vec4<f32>();
        if (team < TEAMS) {
            for (var c = team; c < count; c = c + 4u * TEAMS) {
                let last = count - 1u;
                let c1 = min(c + TEAMS, KEYS - 1u);
                let c2 = min(c + 2u * TEAMS, KEYS - 1u);
                let c3 = min(c + 3u * TEAMS, KEYS - 1u);
                let v0 = cache_load(v_cache[column + c * row_quads]);
                let v1 = cache_load(v_cache[column + min(c1, last) * row_quads]);
                let v2 = cache_load(v_cache[column + min(c2, last) * row_quads]);
                let v3 = cache_load(v_cache[column + min(c3, last) * row_quads]);
                // Keys past the end have weight 0; past the chunk, the weight is left out here.
                let w0 = weights[i * KEYS + c];
                let w1 = select(vec4<f32>(), weights[i * KEYS + c1], c + TEAMS < count);
                let w2 = select(vec4<f32>(), weights[i * KEYS + c2], c + 2u * TEAMS < count);
                let w3 = select(vec4<f32>(), weights[i * KEYS + c3], c + 3u * TEAMS < count);
                sum0 = sum0 + w0.x * v0 + w1.x * v1 + w2.x * v2 + w3.x * v3;
                sum1 = sum1 + w0.y * v0 + w1.y * v1 + w2.y * v2 + w3.y * v3;
                sum2 = sum2 + w0.z * v0 + w1.z * v1 + w2.z * v2 + w3.z * v3;
                sum3 = sum3 + w0.w * v0 + w1.w * v1 + w2.w * v2 + w3.w * v3;
            }
        }
        pieces[lane] = sum0;
        pieces[WG + lane] = sum1;
        pieces[2u * WG + lane] = sum2;
        pieces[3u * WG + lane] = sum3;
        workgroupBarrier();
        for (var j = lane; j < 4u * QUADS; j = j + WG) {
            let head = 4u * i + j / QUADS;
            if (head < GROUP) {
                var total = vec4<f32>();
                for (var t = 0u; t < TEAMS; t = t + 1u) {
                    total = total + pieces[j / QUADS * WG + t * QUADS + j % QUADS];
                }
                partial[((kv_head * GROUP + head) * params.splits + split) * QUADS + j % QUADS] = total;
            }
        }
        workgroupBarrier();
    }
}
