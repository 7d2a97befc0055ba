// Queries of attention for one row: rotate(norm(q[h], q_norm)). The row's own key, rotate(norm(k, k_norm)), and value are not
// in the cache yet: every workgroup makes them for itself, and the first one of a kv head puts them there.
// norm(x, w) = w · x / sqrt(mean(x²) + eps), over a head. Rotating is linear, so that the root is multiplied afterwards: all is
// there after one barrier. Same as queries_given.
// Needs: attention/rotate_quads, attention/head_quads, params.rotary, q_first, k_first, v_first and eps; QUADS a power of two
// and WG a multiple of it.

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;               // [q_first + heads · QUADS or more]
@group(0) @binding(1) var<storage, read> k: array<vec4<f32>>;               // [k_first + kv_heads · QUADS or more]
@group(0) @binding(2) var<storage, read> v: array<vec4<f32>>;               // [v_first + kv_heads · QUADS or more]
@group(0) @binding(3) var<storage, read> q_norm: array<vec4<f32>>;          // [QUADS]
@group(0) @binding(4) var<storage, read> k_norm: array<vec4<f32>>;          // [QUADS]
@group(0) @binding(5) var<storage, read> table: array<vec4<f32>>;           // [rows, rotary] of (cos, sin, cos, sin)
@group(0) @binding(6) var<storage, read_write> k_cache: array<cache_quad>;  // [pool rows, kv_heads, QUADS]
@group(0) @binding(7) var<storage, read_write> v_cache: array<cache_quad>;  // [pool rows, kv_heads, QUADS]

const FRESH: bool = true;

var<workgroup> turned: array<vec4<f32>, 2u * QUADS>;    // weighted and rotated: a head of q, then one of k
var<workgroup> head_squares: array<f32, QUADS / 2u + 2u>;  // Σ x² of what each subgroup has of them
var<workgroup> own_value: array<cache_quad, QUADS>;
var<private> q_root: f32;  // 1 / sqrt(mean(x²) + eps)
var<private> k_root: f32;
var<private> fresh_row: u32;  // of the pool

// Sums of `count` subgroups from `first` on.
fn root_of(first: u32, count: u32) -> f32 {
    var total = 0.0;
    for (var i = 0u; i < count; i = i + 1u) {
        total = total + head_squares[first + i];
    }
    return inverseSqrt(total / f32(4u * QUADS) + params.eps);
}

// `first`: of the workgroups of a head.
fn begin_queries(head: u32, kv_head: u32, lane: u32, row: Row, first: bool) {
    for (var i = lane; i < QUADS; i = i + WG) {
        own_value[i] = cache_pack(v[params.v_first + kv_head * QUADS + i]);
    }
    let width = min(subgroup_lanes(), QUADS);  // lanes whose squares are one sum
    let position = min(row.position, arrayLength(&table) / params.rotary - 1u);
    for (var base = 0u; base < 2u * QUADS; base = base + WG) {
        let at = base + lane;
        let queries = at < QUADS;
        let i = at % QUADS;
        let begin = select(params.k_first + kv_head * QUADS, params.q_first + head * QUADS, queries);
        let raw = head_quad(queries, begin + i);
        let own = raw * head_weight(queries, i);
        var square = dot(raw, raw);
        for (var offset = 1u; offset < width; offset = offset * 2u) {
            square = square + subgroupShuffleXor(square, offset);
        }
        if (at < 2u * QUADS) {
            var value = own;
            if (i < params.rotary) {
                var mate = own;
                if (!INTERLEAVED) {
                    mate = head_quad(queries, begin + partner(i)) * head_weight(queries, partner(i));
                }
                value = rotate(own, mate, turn_at(position, i), i);
            }
            turned[at] = value;
            if (at % width == 0u) {
                head_squares[at / width] = square;
            }
        }
    }
    workgroupBarrier();
    q_root = root_of(0u, QUADS / width);
    k_root = root_of(QUADS / width, QUADS / width);
    fresh_row = row.slot;
    if (first && head % (params.heads / params.kv_heads) == 0u && row.slot < pool_rows()) {
        for (var i = lane; i < QUADS; i = i + WG) {
            let at = (row.slot * params.kv_heads + kv_head) * QUADS + i;
            k_cache[at] = fresh_key(i);
            v_cache[at] = own_value[i];
        }
    }
}

fn query_quad(at: u32, i: u32) -> vec4<f32> {
    return turned[i] * q_root;
}

fn is_fresh(row: u32) -> bool {
    return row == fresh_row;
}

fn fresh_key(i: u32) -> cache_quad {
    return cache_pack(turned[QUADS + i] * k_root);
}

fn fresh_value(i: u32) -> cache_quad {
    return own_value[i];
}
