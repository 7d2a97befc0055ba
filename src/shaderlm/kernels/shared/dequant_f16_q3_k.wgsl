// Weights of format q3_k as f16: see shared/dequant_f16. Needs: shared/format_q3_k, half arithmetic.

struct Raw {
    low: vec2<u32>,
    high: u32,
    scales: vec3<u32>,  // as they are stored
}

fn fetch(row: u32, block: u32) -> Raw {
    return Raw(low_bits(row, block), high_bits(row, block), stored_scales(row, block));
}

// Four bytes of q + 4.
fn three_bit_halves(bytes: u32, scale: u32) -> vec2<u32> {
    let zero = 0xE404E404u;  // −1028
    return vec2<u32>(
        half_multiply(half_add((bytes & 0x00FF00FFu) | HALF_1024, zero), scale),
        half_multiply(half_add(((bytes >> 8u) & 0x00FF00FFu) | HALF_1024, zero), scale));
}

fn eight_halves(raw: Raw, row: u32, block: u32, part: u32) -> vec4<u32> {
    let scale = half_twice(scales_of(raw.scales, block)[part / 2u]);
    let low = raw.low[part / 2u] >> (4u * (part % 2u));
    let high = raw.high >> (2u * part);
    return vec4<u32>(
        three_bit_halves(three_bits(low, high), scale), three_bit_halves(three_bits(low >> 2u, high >> 1u), scale));
}
