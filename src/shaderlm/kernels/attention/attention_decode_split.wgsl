// One query: for each chunk of keys, per query head h
//   stats[h, split] = (m, l) = (max_c score, Σ_c exp(score − m));  partial[h, split, d] = Σ_c exp(score − m) · v[c, d]
// A workgroup owns one kv head and one chunk: every K and V row is read once for all GROUP query heads.
// Grid: one workgroup per (kv head, split), folded. Needs QUADS ≤ WG. attention_decode_merge joins the splits.

const WG: u32 = 128u;       // also the keys of a chunk
const GROUP: u32 = 4u;      // query heads per kv head
const QUADS: u32 = 16u;     // D / 4
const TEAMS: u32 = WG / QUADS;

struct Params {
    context: u32,
    splits: u32,
    kv_heads: u32,
    scale: f32,
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;              // [1, kv_heads · GROUP, QUADS]
@group(0) @binding(1) var<storage, read> k_cache: array<cache_quad>;       // [C, kv_heads, QUADS]
@group(0) @binding(2) var<storage, read> v_cache: array<cache_quad>;       // [C, kv_heads, QUADS]
@group(0) @binding(3) var<storage, read_write> partial: array<vec4<f32>>;  // [kv_heads · GROUP, splits, QUADS]
@group(0) @binding(4) var<storage, read_write> stats: array<vec2<f32>>;    // [kv_heads · GROUP, splits]
@group(0) @binding(5) var<uniform> params: Params;

var<workgroup> q_tile: array<vec4<f32>, GROUP * QUADS>;
var<workgroup> weights: array<f32, GROUP * WG>;
var<workgroup> team_sums: array<vec4<f32>, WG>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let kv_head = index / params.splits;
    let split = index % params.splits;
    if (kv_head >= params.kv_heads) {
        return;
    }
    for (var i = lane; i < GROUP * QUADS; i = i + WG) {
        q_tile[i] = q[kv_head * GROUP * QUADS + i] * params.scale;
    }
    workgroupBarrier();

    // Scores: one key per lane, against every query head of the group.
    let first = split * WG;
    let row_quads = params.kv_heads * QUADS;
    var scores: array<f32, GROUP>;
    if (first + lane < params.context) {
        let key = (first + lane) * row_quads + kv_head * QUADS;
        for (var d = 0u; d < QUADS; d = d + 1u) {
            let k4 = cache_load(k_cache[key + d]);
            for (var g = 0u; g < GROUP; g = g + 1u) {
                scores[g] = scores[g] + dot(q_tile[g * QUADS + d], k4);
            }
        }
    }
    for (var g = 0u; g < GROUP; g = g + 1u) {
        let seen = first + lane < params.context;
        let score = select(-1e30, scores[g], seen);
        let largest = workgroup_max(score, lane);
        let e = select(0.0, exp(score - largest), seen);
        weights[g * WG + lane] = e;
        let total = workgroup_sum(e, lane);
        if (lane == 0u) {
            stats[(kv_head * GROUP + g) * params.splits + split] = vec2<f32>(largest, total);
        }
    }
    workgroupBarrier();

    // Values: QUADS lanes read a row side by side, TEAMS rows at a time.
    let team = lane / QUADS;
    let d = lane % QUADS;
    let count = min(WG, params.context - first);
    var sums: array<vec4<f32>, GROUP>;
    if (team < TEAMS) {
        for (var c = team; c < count; c = c + TEAMS) {
            let v4 = cache_load(v_cache[(first + c) * row_quads + kv_head * QUADS + d]);
            for (var g = 0u; g < GROUP; g = g + 1u) {
                sums[g] = sums[g] + weights[g * WG + c] * v4;
            }
        }
    }
    for (var g = 0u; g < GROUP; g = g + 1u) {
        team_sums[lane] = sums[g];
        workgroupBarrier();
        if (lane < QUADS) {
            var total = team_sums[lane];
            for (var t = 1u; t < TEAMS; t = t + 1u) {
                total = total + team_sums[t * QUADS + lane];
            }
            partial[((kv_head * GROUP + g) * params.splits + split) * QUADS + lane] = total;
        }
        workgroupBarrier();
    }
}
