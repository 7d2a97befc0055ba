// Weights of formats q5_0, q5_1 and q5_k as f16: see shared/dequant_f16. Needs: shared/format_q5, half arithmetic.

struct Raw {
    w: vec4<u32>,
    fifth: u32,
    scales: u32,  // scale and minimum; of superblocks d and dmin
    pair: u32,    // of superblocks: s and m, of two blocks
}

fn fetch(row: u32, block: u32) -> Raw {
    let w = weight[row * (params.k / 32u) + block];
    if (SUPERBLOCKS) {
        let i = (row * params.groups + block / 8u) * 13u;
        return Raw(w, scales[i + 5u + block % 8u], scales[i], scales[i + 1u + block % 8u / 2u]);
    }
    let i = 2u * (row * params.groups + block);
    return Raw(w, scales[i + 1u], scales[i], 0u);
}

// The four low nibbles of a word's bytes with the four lowest bits of `fifth` above them.
fn five_bits(word: u32, fifth: u32, scale: u32, minimum: u32) -> vec2<u32> {
    let zero = half_twice(-1024.0 - 32.0 * (OFFSET - 1.0));
    let a = (word & 0x000F000Fu) | ((fifth << 4u) & 0x10u) | ((fifth << 18u) & 0x100000u);
    let b = ((word >> 8u) & 0x000F000Fu) | ((fifth << 3u) & 0x10u) | ((fifth << 17u) & 0x100000u);
    return vec2<u32>(
        half_fma(half_add(a | HALF_1024, zero), scale, minimum), half_fma(half_add(b | HALF_1024, zero), scale, minimum));
}

fn eight_halves(raw: Raw, row: u32, block: u32, part: u32) -> vec4<u32> {
    var found = unpack2x16float(raw.scales);
    if (SUPERBLOCKS) {
        let pair = raw.pair >> (16u * (block % 2u));
        found = found * vec2<f32>(f32(pair & 255u), -f32((pair >> 8u) & 255u));
    }
    let scale = half_twice(found.x);
    let minimum = half_twice(found.y);
    let words = select(raw.w.xy, raw.w.zw, part % 2u == 1u) >> vec2<u32>(4u * (part / 2u));
    let fifth = raw.fifth >> (8u * part);
    return vec4<u32>(five_bits(words.x, fifth, scale, minimum), five_bits(words.y, fifth >> 4u, scale, minimum));
}
