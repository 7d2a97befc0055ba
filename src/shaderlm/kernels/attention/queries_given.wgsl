// Queries of attention as they are given; keys and values are all in the cache. Same as queries_rms_norm_rope.
// Exports: q, k_cache, v_cache, FRESH, begin_queries(head, kv_head, lane, row, first), query_quad(at, i), is_fresh(row), fresh_key(i),
// fresh_value(i).

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;         // [tokens, heads, QUADS]
@group(0) @binding(1) var<storage, read> k_cache: array<cache_quad>;  // [pool rows, kv_heads, QUADS]
@group(0) @binding(2) var<storage, read> v_cache: array<cache_quad>;  // [pool rows, kv_heads, QUADS]

const FRESH: bool = false;

fn begin_queries(head: u32, kv_head: u32, lane: u32, row: Row, first: bool) {
}

fn query_quad(at: u32, i: u32) -> vec4<f32> {
    return q[at + i];
}

fn is_fresh(row: u32) -> bool {
    return false;
}

fn fresh_key(i: u32) -> cache_quad {
    return cache_quad();
}

fn fresh_value(i: u32) -> cache_quad {
    return cache_quad();
}
