// Weights of formats mxfp4, iq4_nl and iq4_xs as f16: see shared/dequant_f16. Needs: shared/format_codes, half arithmetic.
// Scales of mxfp4 beyond 2^15 count as 2^15, those below 2^-24 as 0.

struct Raw {
    w: vec4<u32>,
    scales: vec2<u32>,  // as they are stored
}

fn fetch(row: u32, block: u32) -> Raw {
    return Raw(weight[row * (params.k / 32u) + block], stored_scale(row, block));
}

// Bytes 0 and 2 of a word, bytes 1 and 3; −128 … 127 is 0 … 255 with the first bit turned.
fn byte_halves(word: u32, scale: u32) -> vec2<u32> {
    let bytes = word ^ 0x80808080u;
    let zero = 0xE480E480u;  // −1152
    return vec2<u32>(
        half_multiply(half_add((bytes & 0x00FF00FFu) | HALF_1024, zero), scale),
        half_multiply(half_add(((bytes >> 8u) & 0x00FF00FFu) | HALF_1024, zero), scale));
}

fn eight_halves(raw: Raw, row: u32, block: u32, part: u32) -> vec4<u32> {
    var scale = scale_of(raw.scales, row, block);
    if (MXFP4) {
        scale = min(scale, 32768.0);
    }
    let twice = half_twice(scale);
    let words = select(raw.w.xy, raw.w.zw, part % 2u == 1u) >> vec2<u32>(4u * (part / 2u));
    return vec4<u32>(byte_halves(code_bytes(words.x), twice), byte_halves(code_bytes(words.y), twice));
}
