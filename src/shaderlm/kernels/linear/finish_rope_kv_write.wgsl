// What becomes of four neighbouring sums of a row: the epilogue rope_kv_write, for many rows. y[n] = bias[n] + sum:
// out = rotate(queries of y);  k_cache[slot] = rotate(keys of y);  v_cache[slot] = values of y, position and slot of the row
// rotate: (u, v) → (u·cos − v·sin, u·sin + v·cos) for elements 2i and 2i + 1 of a head; those past `rotary` are copied.
// Exports: finish(part, m, n, sums). Same function as finish_store. Needs: params, the row count of a batch and a cache
// format; head width, rotary and the first row of the range are multiples of 4.

@group(0) @binding(0) var<storage, read> row_scale: array<f32>;             // [tokens], what sums of a row are multiplied by
@group(0) @binding(1) var<storage, read> bias: array<f32>;                  // [n] if there is one
@group(0) @binding(2) var<storage, read> table: array<vec4<f32>>;           // [positions, rotary / 4] of (cos, sin, cos, sin)
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;       // [tokens, queries / 4]
@group(0) @binding(4) var<storage, read_write> k_cache: array<cache_quad>;  // [pool rows, keys / 4]
@group(0) @binding(5) var<storage, read_write> v_cache: array<cache_quad>;  // [pool rows, keys / 4]

fn finish(part: u32, m: u32, n: u32, sums: vec4<f32>) {
    if (m >= row_count() || n >= params.n) {
        return;
    }
    var y = sums * row_scale[m];
    if (params.epilogue != 0u) {
        y = y + vec4<f32>(bias[n], bias[n + 1u], bias[n + 2u], bias[n + 3u]);
    }
    let record = batch[1u + m];  // (id, position, slot, pages)
    let row = params.n_first + n;
    let i = row % params.width;
    if (row < params.queries + params.keys && i < params.rotary) {
        let position = min(record.y, arrayLength(&table) / (params.rotary / 4u) - 1u);
        let turn = table[(position * params.rotary + i) / 4u];
        y = vec4<f32>(
            y.x * turn.x - y.y * turn.y, y.x * turn.y + y.y * turn.x,
            y.z * turn.z - y.w * turn.w, y.z * turn.w + y.w * turn.z);
    }
    if (row < params.queries) {
        out[(m * params.queries + row) / 4u] = y;
        return;
    }
    // A wrong slot writes nothing. (The last row of the pool is compared, not the slot times a row: that may overflow.)
    let slot = record.z;
    if (slot >= min(arrayLength(&k_cache), arrayLength(&v_cache)) / (params.keys / 4u)) {
        return;
    }
    if (row < params.queries + params.keys) {
        k_cache[(slot * params.keys + row - params.queries) / 4u] = cache_pack(y);
    } else {
        v_cache[(slot * params.keys + row - params.queries - params.keys) / 4u] = cache_pack(y);
    }
}
