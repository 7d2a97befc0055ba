// Weights of formats q4_1 and q4_k as f16: see shared/dequant_f16. Needs: shared/format_q4_min, half arithmetic.

struct Raw {
    w: vec4<u32>,
    scales: u32,  // scale and minimum; of superblocks d and dmin
    pair: u32,    // of superblocks: s and m, of two blocks
}

fn fetch(row: u32, block: u32) -> Raw {
    let w = weight[row * (params.k / 32u) + block];
    if (SUPERBLOCKS) {
        let i = (row * params.groups + block / 8u) * 5u;
        return Raw(w, scales[i], scales[i + 1u + block % 8u / 2u]);
    }
    return Raw(w, scales[row * params.groups + block], 0u);
}

// The four low nibbles of a word's bytes.
fn nibble_halves(word: u32, scale: u32, minimum: u32) -> vec2<u32> {
    let zero = 0xE400E400u;  // −1024
    return vec2<u32>(
        half_fma(half_add((word & 0x000F000Fu) | HALF_1024, zero), scale, minimum),
        half_fma(half_add(((word >> 8u) & 0x000F000Fu) | HALF_1024, zero), scale, minimum));
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
    return vec4<u32>(nibble_halves(words.x, scale, minimum), nibble_halves(words.y, scale, minimum));
}
