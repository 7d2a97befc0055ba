// Inputs of 16 bits as two signed bytes, v = 256 · h + l, times bytes of weights: exactly, four at a time.
// Exports: Sixteen, bytes_dot, sixteen_dot and block_dot, for the files of formats (int16_FORMAT). Each of these exports
// int16_dot(weights, first, second, unit): the 32 weights of a block times 32 inputs of 16 bits;
// unit = (unit, unit · Σ of the first 16 inputs, the same of the others).

// Bytes of sixteen inputs.
struct Sixteen {
    h: vec4<u32>,
    l: vec4<u32>,
}

fn bytes_dot(a: vec4<u32>, b: vec4<u32>) -> i32 {
    return dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}

// Sixteen weights of a byte times sixteen inputs, and 32 times 32: at most 32 · 127 · 32,512, which an i32 holds.
fn sixteen_dot(weights: vec4<u32>, inputs: Sixteen) -> f32 {
    return f32((bytes_dot(weights, inputs.h) << 8u) + bytes_dot(weights, inputs.l));
}

fn block_dot(low: vec4<u32>, high: vec4<u32>, first: Sixteen, second: Sixteen) -> f32 {
    let h = bytes_dot(low, first.h) + bytes_dot(high, second.h);
    let l = bytes_dot(low, first.l) + bytes_dot(high, second.l);
    return f32((h << 8u) + l);
}
