// Rows of the pool: how many there are, and quads of keys and values, four loads at a time, because one after the other
// they would each wait a full trip to memory. Needs: shared/batch, k_cache, v_cache, params.kv_heads, QUADS.
// Exports: pool_rows(), last_key(row), struct Raw, load_key(row, kv_head, d), value_quads(column, rows).

fn pool_rows() -> u32 {
    return arrayLength(&k_cache) / (params.kv_heads * QUADS);
}

// The last key that a row sees. A wrong position leads to no row outside the pool.
fn last_key(row: Row) -> u32 {
    return min(row.position, pool_rows() - 1u);
}

struct Raw {
    a: cache_quad, b: cache_quad, c: cache_quad, d: cache_quad,
}

// Four quads of a key, four apart, from quad d on; past the end the last one.
fn load_key(row: u32, kv_head: u32, d: u32) -> Raw {
    let at = (row * params.kv_heads + kv_head) * QUADS;
    return Raw(
        k_cache[at + min(d, QUADS - 1u)], k_cache[at + min(d + 4u, QUADS - 1u)],
        k_cache[at + min(d + 8u, QUADS - 1u)], k_cache[at + min(d + 12u, QUADS - 1u)],
    );
}

// One quad of four rows of values.
fn value_quads(column: u32, rows: vec4<u32>) -> Raw {
    let at = rows * (params.kv_heads * QUADS) + column;
    return Raw(v_cache[at.x], v_cache[at.y], v_cache[at.z], v_cache[at.w]);
}
