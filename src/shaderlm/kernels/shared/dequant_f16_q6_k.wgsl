// Weights of format q6_k as f16: see shared/dequant_f16. Needs: half arithmetic.

struct Raw {
    low: vec4<u32>,
    high: vec4<u32>,  // of two blocks
    pair: u32,        // s of two blocks
    d: u32,
}

fn fetch(row: u32, block: u32) -> Raw {
    let i = row * (params.k / 64u * 3u) + block / 2u * 3u;
    let s = (row * params.groups + block / 8u) * 5u;
    return Raw(weight[i + block % 2u], weight[i + 2u], scales[s + block % 8u / 2u], scales[s + 4u]);
}

// The four low nibbles of a word's bytes with the two lowest bits of the bytes of `high` above them, each −32.
fn six_bit_halves(low: u32, high: u32, scale: u32) -> vec2<u32> {
    let zero = 0xE420E420u;  // −1056
    let a = (low & 0x000F000Fu) | ((high & 0x00030003u) << 4u);
    let b = ((low >> 8u) & 0x000F000Fu) | ((high >> 4u) & 0x00300030u);
    return vec2<u32>(
        half_multiply(half_add(a | HALF_1024, zero), scale), half_multiply(half_add(b | HALF_1024, zero), scale));
}

fn eight_halves(raw: Raw, row: u32, block: u32, part: u32) -> vec4<u32> {
    let half = part / 2u;
    let s = f32(unpack4xI8(raw.pair)[2u * (block % 2u) + half]) * unpack2x16float(raw.d).x;
    let scale = half_twice(s);
    let low = select(raw.low.xy, raw.low.zw, part % 2u == 1u) >> vec2<u32>(4u * half);
    let both = select(raw.high.xy, raw.high.zw, block % 2u == 1u);
    let high = select(both.x, both.y, half == 1u) >> (4u * (part % 2u));
    return vec4<u32>(six_bit_halves(low.x, high, scale), six_bit_halves(low.y, high >> 2u, scale));
}
