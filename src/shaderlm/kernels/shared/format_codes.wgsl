// Weight formats mxfp4, iq4_nl and iq4_xs: one vec4<u32> holds 32 codes of 4 bits, each of which stands for a number;
// w = scale · number, a scale per 32 weights.
// Byte j of component c: low nibble = weight 4c + j, high nibble = weight 16 + 4c + j. (GGUF's Q4_0 order.)
// mxfp4 (MXFP4): a scale is a byte e, for 2^(e − 128). (0 for e < 2: GPUs have no such numbers.) A code is a sign and a
// float of three bits; its number is twice that. iq4_nl: a scale is an f16. iq4_xs (SUPERBLOCKS): per 256 weights two u32,
// an f16 d, eight times two bits and eight times four bits; with 2 + 4 bits s of a block the scale is d · (s − 32).
// Exports: as shared/format_f32, and packed_bytes(those), 32 signed bytes of which ZERO_POINT is to be taken off.

const MXFP4: bool = true;
const SUPERBLOCKS: bool = false;

fn chosen(a: u32, b: u32, mask: u32) -> u32 {
    return a ^ ((a ^ b) & mask);
}

// The numbers of the four low nibbles of a word's bytes, as signed bytes, all four at once.
fn code_bytes(word: u32) -> u32 {
    if (MXFP4) {
        // 0, 1, 2, 3, 4, 6, 8, 12: the code, from 4 on its last two bits more, at 7 two more.
        let large = (word >> 2u) & 0x01010101u;
        let number = (word & 0x07070707u) + (word & (large * 3u)) + ((word & (word >> 1u) & large) << 1u);
        // A zero has no sign: its complement would carry.
        let negative = (word >> 3u) & (word | (word >> 1u) | (word >> 2u)) & 0x01010101u;
        return (number ^ (negative * 255u)) + negative;
    }
    // −127, −104, −83, −65, −49, −35, −22, −10, 1, 13, 25, 38, 53, 69, 89, 113: each bit of the codes halves the choice.
    let bit0 = (word & 0x01010101u) * 255u;
    let bit1 = ((word >> 1u) & 0x01010101u) * 255u;
    let bit2 = ((word >> 2u) & 0x01010101u) * 255u;
    let bit3 = ((word >> 3u) & 0x01010101u) * 255u;
    let low = chosen(
        chosen(chosen(0x81818181u, 0x98989898u, bit0), chosen(0xADADADADu, 0xBFBFBFBFu, bit0), bit1),
        chosen(chosen(0xCFCFCFCFu, 0xDDDDDDDDu, bit0), chosen(0xEAEAEAEAu, 0xF6F6F6F6u, bit0), bit1), bit2);
    let high = chosen(
        chosen(chosen(0x01010101u, 0x0D0D0D0Du, bit0), chosen(0x19191919u, 0x26262626u, bit0), bit1),
        chosen(chosen(0x35353535u, 0x45454545u, bit0), chosen(0x59595959u, 0x71717171u, bit0), bit1), bit2);
    return chosen(low, high, bit3);
}

// What is stored for the scale of a block: mxfp4 and iq4_nl a u32 with those of neighbours, iq4_xs two u32.
fn stored_scale(row: u32, block: u32) -> vec2<u32> {
    if (SUPERBLOCKS) {
        let i = 2u * (row * params.groups + block / 8u);
        return vec2<u32>(scales[i], scales[i + 1u]);
    }
    return vec2<u32>(scales[(row * params.groups + block) / select(2u, 4u, MXFP4)], 0u);
}

fn scale_of(stored: vec2<u32>, row: u32, block: u32) -> f32 {
    let i = row * params.groups + block;
    if (MXFP4) {
        let e = (stored.x >> (8u * (i % 4u))) & 255u;
        return bitcast<f32>((max(e, 1u) - 1u) << 23u);
    }
    if (SUPERBLOCKS) {
        let at = block % 8u;
        let s = ((stored.y >> (4u * at)) & 15u) | (((stored.x >> (16u + 2u * at)) & 3u) << 4u);
        return unpack2x16float(stored.x).x * (f32(s) - 32.0);
    }
    return unpack2x16float(stored.x)[i % 2u];
}

fn scale_at(row: u32, block: u32) -> f32 {
    return scale_of(stored_scale(row, block), row, block);
}

fn numbers(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(code_bytes(word)));
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let block = quad / 8u;
    let word = weight[row * (params.k / 32u) + block][quad % 4u] >> (4u * (quad / 4u % 2u));
    return numbers(word) * scale_at(row, block);
}

struct Packed {
    w: vec4<u32>,
    scale: f32,
}

fn load_block(row: u32, block: u32) -> Packed {
    return Packed(weight[row * (params.k / 32u) + block], scale_at(row, block));
}

fn packed_dot(
    p: Packed,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
) -> f32 {
    let h = p.w >> vec4<u32>(4u);
    let sum = dot(x0, numbers(p.w.x)) + dot(x1, numbers(p.w.y)) + dot(x2, numbers(p.w.z)) + dot(x3, numbers(p.w.w))
        + dot(x4, numbers(h.x)) + dot(x5, numbers(h.y)) + dot(x6, numbers(h.z)) + dot(x7, numbers(h.w));
    return sum * p.scale;
}

const ZERO_POINT: i32 = 0;

struct Bytes {
    a: vec4<u32>,  // weights 0 … 15, four a word
    b: vec4<u32>,  // weights 16 … 31
}

fn four_code_bytes(w: vec4<u32>) -> vec4<u32> {
    return vec4<u32>(code_bytes(w.x), code_bytes(w.y), code_bytes(w.z), code_bytes(w.w));
}

fn packed_bytes(p: Packed) -> Bytes {
    return Bytes(four_code_bytes(p.w), four_code_bytes(p.w >> vec4<u32>(4u)));
}
