// Epilogue rope_kv_write of a row of x: the rows of the weight are queries, keys and values; y[n] = bias[n] + sum.
// out = rotate(queries of y);  k_cache[slot] = rotate(keys of y);  v_cache[slot] = values of y, position and slot of the row
// rotate: (u, v) → (u·cos − v·sin, u·sin + v·cos) for elements 2i and 2i + 1 of a head; those past `rotary` are copied.
// Exports: begin(first), before the weights are multiplied, store_rows(first, sums) and finish_rows(workgroup, lane). Rows are
// taken in pairs: STORED > 1. Same functions as store_rows; and row_count().
// Needs: const STORED, x_row, bias, params and a cache format.

@group(0) @binding(0) var<storage, read> batch: array<vec4<u32>>;           // [1 + tokens]: counts, then (id, position, slot, pages)
@group(0) @binding(1) var<storage, read> table: array<vec2<f32>>;           // [positions, rotary / 2] of (cos, sin)
@group(0) @binding(2) var<storage, read_write> out: array<vec2<f32>>;       // [tokens, queries / 2]
@group(0) @binding(3) var<storage, read_write> k_cache: array<cache_pair>;  // [pool rows, keys / 2]
@group(0) @binding(4) var<storage, read_write> v_cache: array<cache_pair>;  // [pool rows, keys / 2]

var<private> row_record: vec4<u32>;
var<private> turns: vec4<f32>;  // of the first pair of rows, and of the second

fn row_count() -> u32 {
    return min(params.tokens, batch[0].x);
}

fn turn_of(row: u32) -> vec2<f32> {
    let i = row % params.width;
    if (row < params.queries + params.keys && i < params.rotary) {
        return table[(row_record.y * params.rotary + i) / 2u];
    }
    return vec2<f32>(1.0, 0.0);
}

// At the end there would be nothing to hide the wait for the table.
fn begin(first: u32) {
    row_record = batch[1u + x_row()];
    turns = vec4<f32>(turn_of(params.n_first + first), turn_of(params.n_first + first + 2u));
}

fn biased(n: u32, sum: f32) -> f32 {
    if (params.epilogue != 0u) {
        return sum + bias[n];
    }
    return sum;
}

fn store_turned(n: u32, sum: f32, next: f32, turn: vec2<f32>) {
    if (n >= params.n) {
        return;
    }
    let y = vec2<f32>(biased(n, sum), biased(n + 1u, next));
    let value = vec2<f32>(y.x * turn.x - y.y * turn.y, y.x * turn.y + y.y * turn.x);
    let row = params.n_first + n;
    if (row < params.queries) {
        out[(x_row() * params.queries + row) / 2u] = value;
        return;
    }
    // A wrong slot writes nothing. (The last row of the pool is compared, not the slot times a row: that may overflow.)
    let slot = row_record.z;
    if (slot >= arrayLength(&k_cache) / (params.keys / 2u)) {
        return;
    }
    if (row < params.queries + params.keys) {
        k_cache[slot * (params.keys / 2u) + (row - params.queries) / 2u] = cache_pack_pair(value);
    } else {
        v_cache[slot * (params.keys / 2u) + (row - params.queries - params.keys) / 2u] = cache_pack_pair(value);
    }
}

fn store_rows(first: u32, sums: vec4<f32>) {
    store_turned(first, sums.x, sums.y, turns.xy);
    if (STORED > 2u) {
        store_turned(first + 2u, sums.z, sums.w, turns.zw);
    }
}

fn finish_rows(workgroup: u32, lane: u32) {
}
