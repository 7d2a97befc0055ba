// Weight formats q4_1 and q4_k: one vec4<u32> holds 32 weights, q in 4 bits; w = scale · q + minimum, both per 32.
// Byte j of component c: low nibble = weight 4c + j, high nibble = weight 16 + 4c + j. (GGUF's Q4_1 order.)
// q4_1: scale and minimum are two f16 in a u32. q4_k (SUPERBLOCKS): per 256 weights five u32, the first two f16
// (d, dmin), the others 8 pairs of bytes (s, m); the scale is d · s, the minimum −dmin · m.
// Exports: as shared/format_f32.

const SUPERBLOCKS: bool = false;

fn scale_and_minimum(row: u32, block: u32) -> vec2<f32> {
    if (SUPERBLOCKS) {
        let i = (row * params.groups + block / 8u) * 5u;
        let pair = scales[i + 1u + block % 8u / 2u] >> (16u * (block % 2u));
        return unpack2x16float(scales[i]) * vec2<f32>(f32(pair & 255u), -f32((pair >> 8u) & 255u));
    }
    return unpack2x16float(scales[row * params.groups + block]);
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let block = quad / 8u;
    let word = weight[row * (params.k / 32u) + block][quad % 4u] >> (4u * (quad / 4u % 2u));
    let scale = scale_and_minimum(row, block);
    return vec4<f32>(unpack4xU8(word & 0x0F0F0F0Fu)) * scale.x + scale.y;
}

struct Packed {
    w: vec4<u32>,
    scale: vec2<f32>,  // and minimum
}

fn load_block(row: u32, block: u32) -> Packed {
    return Packed(weight[row * (params.k / 32u) + block], scale_and_minimum(row, block));
}

// q / 16, exactly: as the top of the mantissa a nibble makes 1 + q/16. Cheaper than a conversion.
fn sixteenths(word: u32) -> vec4<f32> {
    let q = vec4<u32>(word << 19u, word << 11u, word << 3u, word >> 5u) & vec4<u32>(0x00780000u);
    return bitcast<vec4<f32>>(q | vec4<u32>(0x3F800000u)) - 1.0;
}

fn packed_dot(
    p: Packed,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
) -> f32 {
    let h = p.w >> vec4<u32>(4u);
    let sum = dot(x0, sixteenths(p.w.x)) + dot(x1, sixteenths(p.w.y)) + dot(x2, sixteenths(p.w.z)) + dot(x3, sixteenths(p.w.w))
        + dot(x4, sixteenths(h.x)) + dot(x5, sixteenths(h.y)) + dot(x6, sixteenths(h.z)) + dot(x7, sixteenths(h.w));
    // Σ x is the same for every row: once inlined, a compiler computes it once.
    let ones = dot(((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7)), vec4<f32>(1.0));
    return sum * (16.0 * p.scale.x) + ones * p.scale.y;
}
