// Weights of format q2_k as f16: see shared/dequant_f16. Needs: shared/format_q2_k, half arithmetic.

struct Raw {
    low: vec2<u32>,
    scales: vec2<u32>,  // as they are stored
}

fn fetch(row: u32, block: u32) -> Raw {
    return Raw(low_bits(row, block), stored_scales(row, block));
}

// The two lowest bits of a word's bytes.
fn two_bit_halves(word: u32, scale: u32, minimum: u32) -> vec2<u32> {
    let zero = 0xE400E400u;  // −1024
    return vec2<u32>(
        half_fma(half_add((word & 0x00030003u) | HALF_1024, zero), scale, minimum),
        half_fma(half_add(((word >> 8u) & 0x00030003u) | HALF_1024, zero), scale, minimum));
}

fn eight_halves(raw: Raw, row: u32, block: u32, part: u32) -> vec4<u32> {
    let both = scales_of(raw.scales, block);
    let found = select(both.xy, both.zw, part >= 2u);
    let scale = half_twice(found.x);
    let minimum = half_twice(found.y);
    let low = raw.low[part / 2u] >> (4u * (part % 2u));
    return vec4<u32>(two_bit_halves(low, scale, minimum), two_bit_halves(low >> 2u, scale, minimum));
}
