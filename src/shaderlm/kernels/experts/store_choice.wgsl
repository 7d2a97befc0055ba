// What becomes of four sums of a choice: y + bias, apply(y[0], y[1]) and apply(y[2], y[3]), or, if SUM, factor · (y + bias),
// for a later sum over the choices of a row. Columns past the end are dropped. `apply` is included.
// Exports: has, GATED, SUM, store_choice(choice, expert, columns, sums), alias value. Needs: params.n, params.combine.

@group(0) @binding(0) var<storage, read> bias: array<f32>;         // [experts · n] if there is one
@group(0) @binding(1) var<storage, read> factors: array<f32>;      // [tokens, used] if they count
@group(0) @binding(2) var<storage, read_write> out: array<f32>;    // [tokens · used, n], or [tokens · used, n / 2]

alias value = f32;

// Bits of params.combine.
const GATED: u32 = 1u;
const SUM: u32 = 2u;
const BIAS: u32 = 4u;

fn has(part: u32) -> bool {
    return (params.combine & part) != 0u;
}

fn biased(expert: u32, n: u32, sum: f32) -> f32 {
    if (has(BIAS)) {
        return sum + bias[expert * params.n + min(n, params.n - 1u)];
    }
    return sum;
}

fn store(choice: u32, n: u32, sum: f32) {
    if (n < params.n) {
        out[choice * params.n + n] = sum;
    }
}

fn store_choice(choice: u32, expert: u32, columns: vec4<u32>, sums: vec4<f32>) {
    let values = vec4<f32>(
        biased(expert, columns.x, sums.x),
        biased(expert, columns.y, sums.y),
        biased(expert, columns.z, sums.z),
        biased(expert, columns.w, sums.w),
    );
    if (has(GATED)) {
        if (columns.x < params.n) {
            out[choice * (params.n / 2u) + columns.x / 2u] = apply(values.x, values.y);
        }
        if (columns.z < params.n) {
            out[choice * (params.n / 2u) + columns.z / 2u] = apply(values.z, values.w);
        }
        return;
    }
    var factor = 1.0;
    if (has(SUM)) {
        factor = factors[choice];
    }
    store(choice, columns.x, factor * values.x);
    store(choice, columns.y, factor * values.y);
    store(choice, columns.z, factor * values.z);
    store(choice, columns.w, factor * values.w);
}
