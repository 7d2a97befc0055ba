// Weight format mxfp4: one vec4<u32> holds 32 codes of 4 bits, each of which stands for a number; w = scale · number.
// Byte j of component c: low nibble = weight 4c + j, high nibble = weight 16 + 4c + j. (GGUF's Q4_0 order.)
// mxfp4: a byte e of scales per 32 weights, the scale is 2^(e − 128). (0 for e < 2: GPUs have no such numbers.) A code is
// a sign and a float of three bits; its number is twice that.
// Exports: weight4(row, quad), four weights from k = 4·quad; load_block(row, block), the 32 weights from
// k = 32·block as they lie; packed_dot(those, x0 … x7), their dot product with x;
// and for integer arithmetic packed_bytes(those), 32 signed bytes of which ZERO_POINT is to be taken off.

// The numbers of the four low nibbles of a word's bytes, as signed bytes, all four at once.
fn code_bytes(word: u32) -> u32 {
    // 0, 1, 2, 3, 4, 6, 8, 12: the code, from 4 on its last two bits more, at 7 two more.
    let large = (word >> 2u) & 0x01010101u;
    let number = (word & 0x07070707u) + (word & (large * 3u)) + ((word & (word >> 1u) & large) << 1u);
    // A zero has no sign: its complement would carry.
    let negative = (word >> 3u) & (word | (word >> 1u) | (word >> 2u)) & 0x01010101u;
    return (number ^ (negative * 255u)) + negative;
}

fn scale_at(row: u32, block: u32) -> f32 {
    let i = row * params.groups + block;
    let e = (scales[i / 4u] >> (8u * (i % 4u))) & 255u;
    return bitcast<f32>((max(e, 1u) - 1u) << 23u);
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
