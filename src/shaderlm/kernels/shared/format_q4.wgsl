// Weight format q4: one vec4<u32> holds 32 weights, q + 8 in 4 bits; a scale per GROUP_BLOCKS · 32 weights.
// Byte j of component c: low nibble = weight 4c + j, high nibble = weight 16 + 4c + j. (GGUF's Q4_0 order.)
// Exports: weight4(row, quad), four weights from k = 4·quad; block_dot(row, block, x0 … x7, x_sum), the dot
// product of 32 weights from k = 32·block with x, whose sum is x_sum.

const F16_SCALES: bool = true;
const GROUP_BLOCKS: u32 = 1u;

fn scale_at(i: u32) -> f32 {
    if (F16_SCALES) {
        return unpack2x16float(scales[i / 2u])[i % 2u];
    }
    return bitcast<f32>(scales[i]);
}

fn nibbles(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(word & 0x0F0F0F0Fu));
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let block = quad / 8u;
    let word = weight[row * (params.k / 32u) + block][quad % 4u] >> (4u * (quad / 4u % 2u));
    return (nibbles(word) - 8.0) * scale_at(row * params.groups + block / GROUP_BLOCKS);
}

fn block_dot(
    row: u32, block: u32,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>, x_sum: f32,
) -> f32 {
    let w = weight[row * (params.k / 32u) + block];
    let h = w >> vec4<u32>(4u);
    let sum = dot(x0, nibbles(w.x)) + dot(x1, nibbles(w.y)) + dot(x2, nibbles(w.z)) + dot(x3, nibbles(w.w))
        + dot(x4, nibbles(h.x)) + dot(x5, nibbles(h.y)) + dot(x6, nibbles(h.z)) + dot(x7, nibbles(h.w));
    // Σ x·(q − 8) = Σ x·q − 8·Σ x: one multiply for the block instead of 32 subtractions.
    return (sum - 8.0 * x_sum) * scale_at(row * params.groups + block / GROUP_BLOCKS);
}
