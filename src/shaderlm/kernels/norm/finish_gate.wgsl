// What becomes of a norm: it is multiplied with silu of columns of the rows `gate`. Exports: beside_at(i),
// finish(beside, normed). Needs: alias value, f32 or vec4<f32>; pointwise/apply_silu_mul.

const GATE_VALUES: u32 = 1u;  // of a token, in values
const GATE_STRIDE: u32 = 1u;  // between rows of gate, in values
const GATE_FIRST: u32 = 0u;   // column of gate, in values

@group(0) @binding(0) var<storage, read> gate: array<value>;  // [tokens, GATE_STRIDE]

fn beside_at(i: u32) -> value {
    return gate[i / GATE_VALUES * GATE_STRIDE + GATE_FIRST + i % GATE_VALUES];
}

fn finish(beside: value, normed: value) -> value {
    return apply(beside, normed);
}
