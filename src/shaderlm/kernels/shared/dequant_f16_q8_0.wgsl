// Weights of format q8_0 as f16: see shared/dequant_f16. Needs: half arithmetic.

struct Raw {
    a: vec4<u32>, b: vec4<u32>,
    scales: u32,  // of two blocks
}

fn fetch(row: u32, block: u32) -> Raw {
    let i = row * (params.k / 16u) + 2u * block;
    return Raw(weight[i], weight[i + 1u], scales[(row * params.groups + block) / 2u]);
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
    let scale = one_half_twice(raw.scales, (row * params.groups + block) % 2u);
    let four = select(raw.a, raw.b, part >= 2u);
    let words = select(four.xy, four.zw, part % 2u == 1u);
    return vec4<u32>(byte_halves(words.x, scale), byte_halves(words.y, scale));
}
