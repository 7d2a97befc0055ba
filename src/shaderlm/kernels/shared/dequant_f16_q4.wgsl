// Weights of format q4_0 as f16: see shared/dequant_f16. Needs: half arithmetic.

struct Raw {
    w: vec4<u32>,
    scales: u32,  // of two blocks
}

fn fetch(row: u32, block: u32) -> Raw {
    return Raw(weight[row * (params.k / 32u) + block], scales[(row * params.groups + block) / 2u]);
}

// The four low nibbles of a word's bytes, each −8.
fn nibble_halves(word: u32, scale: u32) -> vec2<u32> {
    let zero = 0xE408E408u;  // −1032
    return vec2<u32>(
        half_multiply(half_add((word & 0x000F000Fu) | HALF_1024, zero), scale),
        half_multiply(half_add(((word >> 8u) & 0x000F000Fu) | HALF_1024, zero), scale));
}

fn eight_halves(raw: Raw, row: u32, block: u32, part: u32) -> vec4<u32> {
    let scale = one_half_twice(raw.scales, (row * params.groups + block) % 2u);
    let words = select(raw.w.xy, raw.w.zw, part % 2u == 1u) >> vec2<u32>(4u * (part / 2u));
    return vec4<u32>(nibble_halves(words.x, scale), nibble_halves(words.y, scale));
}
