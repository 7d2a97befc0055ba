// Weight formats q5_0, q5_1 and q5_k: one vec4<u32> holds the low nibbles of 32 weights, q in 5 bits;
// w = scale · (q − 32 · (OFFSET − 1)) + minimum, scale and minimum per 32.
// Byte j of component c: low nibble = weight 4c + j, high nibble = weight 16 + 4c + j. (GGUF's Q5_1 order.)
// Beside them, q5_0 and q5_1: per 32 weights two u32, the first two f16 (scale, minimum), the other the fifth bits,
// that of weight i in bit i. q5_k (SUPERBLOCKS): per 256 weights thirteen u32, the first two f16 (d, dmin), then 8
// pairs of bytes (s, m), then eight u32 of fifth bits; the scale is d · s, the minimum −dmin · m.
// Exports: as shared/format_f32.

const SUPERBLOCKS: bool = false;
const OFFSET: f32 = 1.0;  // 1.5 for q5_0, whose q counts from 16 below zero

fn scale_and_minimum(row: u32, block: u32) -> vec2<f32> {
    if (SUPERBLOCKS) {
        let i = (row * params.groups + block / 8u) * 13u;
        let pair = scales[i + 1u + block % 8u / 2u] >> (16u * (block % 2u));
        return unpack2x16float(scales[i]) * vec2<f32>(f32(pair & 255u), -f32((pair >> 8u) & 255u));
    }
    return unpack2x16float(scales[2u * (row * params.groups + block)]);
}

fn fifth_bits(row: u32, block: u32) -> u32 {
    if (SUPERBLOCKS) {
        return scales[(row * params.groups + block / 8u) * 13u + 5u + block % 8u];
    }
    return scales[2u * (row * params.groups + block) + 1u];
}

// (q − 32 · (OFFSET − 1)) / 32, exactly: as the top of the mantissa five bits make 1 + q/32. Cheaper than a conversion.
// The four low nibbles of `word`, the four lowest bits of `fifth`.
fn thirty_seconds(word: u32, fifth: u32) -> vec4<f32> {
    let low = vec4<u32>(word << 18u, word << 10u, word << 2u, word >> 6u) & vec4<u32>(0x003C0000u);
    let high = vec4<u32>(fifth << 22u, fifth << 21u, fifth << 20u, fifth << 19u) & vec4<u32>(0x00400000u);
    return bitcast<vec4<f32>>(low | high | vec4<u32>(0x3F800000u)) - OFFSET;
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let block = quad / 8u;
    let word = weight[row * (params.k / 32u) + block][quad % 4u] >> (4u * (quad / 4u % 2u));
    let scale = scale_and_minimum(row, block);
    return thirty_seconds(word, fifth_bits(row, block) >> (4u * (quad % 8u))) * (32.0 * scale.x) + scale.y;
}

struct Packed {
    w: vec4<u32>,
    fifth: u32,
    scale: vec2<f32>,  // and minimum
}

fn load_block(row: u32, block: u32) -> Packed {
    return Packed(weight[row * (params.k / 32u) + block], fifth_bits(row, block), scale_and_minimum(row, block));
}

fn packed_dot(
    p: Packed,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
) -> f32 {
    let h = p.w >> vec4<u32>(4u);
    let sum = dot(x0, thirty_seconds(p.w.x, p.fifth)) + dot(x1, thirty_seconds(p.w.y, p.fifth >> 4u))
        + dot(x2, thirty_seconds(p.w.z, p.fifth >> 8u)) + dot(x3, thirty_seconds(p.w.w, p.fifth >> 12u))
        + dot(x4, thirty_seconds(h.x, p.fifth >> 16u)) + dot(x5, thirty_seconds(h.y, p.fifth >> 20u))
        + dot(x6, thirty_seconds(h.z, p.fifth >> 24u)) + dot(x7, thirty_seconds(h.w, p.fifth >> 28u));
    // Σ x is the same for every row: once inlined, a compiler computes it once.
    let ones = dot(((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7)), vec4<f32>(1.0));
    return sum * (32.0 * p.scale.x) + ones * p.scale.y;
}
