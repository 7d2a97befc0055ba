// Weight format q4: one vec4<u32> holds 32 weights, q + 8 in 4 bits; a scale per GROUP_BLOCKS · 32 weights.
// Byte j of component c: low nibble = weight 4c + j, high nibble = weight 16 + 4c + j. (GGUF's Q4_0 order.)
// Exports: as shared/format_f32, and packed_bytes(those), 32 signed bytes of which ZERO_POINT is to be taken off.

const F16_SCALES: bool = true;
const GROUP_BLOCKS: u32 = 1u;

fn scale_at(i: u32) -> f32 {
    if (F16_SCALES) {
        return unpack2x16float(scales[i / 2u])[i % 2u];
    }
    return bitcast<f32>(scales[i]);
}

// (q − 8) / 16, exactly: as the top of the mantissa a nibble makes 1 + q/16. Two integer operations and a
// subtraction, where a conversion takes more. (Subtracting 24·Σ x from the sum instead would be cheaper still, but
// cancels where one x is far larger than the others.)
fn sixteenths(word: u32) -> vec4<f32> {
    let q = vec4<u32>(word << 19u, word << 11u, word << 3u, word >> 5u) & vec4<u32>(0x00780000u);
    return bitcast<vec4<f32>>(q | vec4<u32>(0x3F800000u)) - 1.5;
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let block = quad / 8u;
    let word = weight[row * (params.k / 32u) + block][quad % 4u] >> (4u * (quad / 4u % 2u));
    return (vec4<f32>(unpack4xU8(word & 0x0F0F0F0Fu)) - 8.0) * scale_at(row * params.groups + block / GROUP_BLOCKS);
}

struct Packed {
    w: vec4<u32>,
    scale: f32,
}

fn load_block(row: u32, block: u32) -> Packed {
    return Packed(weight[row * (params.k / 32u) + block], scale_at(row * params.groups + block / GROUP_BLOCKS));
}

fn packed_dot(
    p: Packed,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
) -> f32 {
    let h = p.w >> vec4<u32>(4u);
    let sum = dot(x0, sixteenths(p.w.x)) + dot(x1, sixteenths(p.w.y)) + dot(x2, sixteenths(p.w.z)) + dot(x3, sixteenths(p.w.w))
        + dot(x4, sixteenths(h.x)) + dot(x5, sixteenths(h.y)) + dot(x6, sixteenths(h.z)) + dot(x7, sixteenths(h.w));
    return sum * (16.0 * p.scale);
}

const ZERO_POINT: i32 = 8;

struct Bytes {
    a: vec4<u32>,  // weights 0 … 15, four a word
    b: vec4<u32>,  // weights 16 … 31
}

fn packed_bytes(p: Packed) -> Bytes {
    return Bytes(p.w & vec4<u32>(0x0F0F0F0Fu), (p.w >> vec4<u32>(4u)) & vec4<u32>(0x0F0F0F0Fu));
}
