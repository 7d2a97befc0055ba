// Blocks of 32 weights of format q6_k as f16, in the order of `Halves`. What was fetched is not looked at before it is
// needed: the kernel fetches a step ahead.
// Exports: Raw, fetch(row, block), block_halves(raw, row, block). Needs: shared/halves, half arithmetic.

struct Raw {
    low: vec4<u32>,
    high: vec2<u32>,
    pair: u32,  // s of two blocks
    d: u32,
}

fn fetch(row: u32, block: u32) -> Raw {
    let i = row * (params.k / 64u * 3u) + block / 2u * 3u;
    let s = (row * params.groups + block / 8u) * 5u;
    let high = vec2<u32>(weight[i + 2u][block % 2u * 2u], weight[i + 2u][block % 2u * 2u + 1u]);
    return Raw(weight[i + block % 2u], high, scales[s + block % 8u / 2u], scales[s + 4u]);
}

// The four low nibbles of a word's bytes with the two lowest bits of the bytes of `high` above them, each −32.
fn six_bits_halves(low: u32, high: u32, scale: u32) -> vec2<u32> {
    let zero = 0xE420E420u;  // −1056
    let a = (low & 0x000F000Fu) | ((high & 0x00030003u) << 4u);
    let b = ((low >> 8u) & 0x000F000Fu) | ((high >> 4u) & 0x00300030u);
    return vec2<u32>(
        half_multiply(half_add(a | HALF_1024, zero), scale), half_multiply(half_add(b | HALF_1024, zero), scale));
}

fn block_halves(raw: Raw, row: u32, block: u32) -> Halves {
    let each = vec2<f32>(unpack4xI8(raw.pair >> (16u * (block % 2u))).xy) * unpack2x16float(raw.d).x;
    let s = half_twice(each.x);
    let t = half_twice(each.y);
    let l = raw.low;
    let h = raw.low >> vec4<u32>(4u);
    let x = raw.high.x;
    let y = raw.high.y;
    return Halves(
        vec4<u32>(six_bits_halves(l.x, x, s), six_bits_halves(l.y, x >> 2u, s)),
        vec4<u32>(six_bits_halves(l.z, x >> 4u, s), six_bits_halves(l.w, x >> 6u, s)),
        vec4<u32>(six_bits_halves(h.x, y, t), six_bits_halves(h.y, y >> 2u, t)),
        vec4<u32>(six_bits_halves(h.z, y >> 4u, t), six_bits_halves(h.w, y >> 6u, t)));
}
