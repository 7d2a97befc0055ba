// Blocks of 32 weights of formats q5_0, q5_1 and q5_k as f16, in the order of `Halves`. What was fetched is not looked
// at before it is needed: the kernel fetches a step ahead.
// Exports: Raw, fetch(row, block), block_halves(raw, row, block). Needs: shared/format_q5, shared/halves, half arithmetic.

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

fn block_halves(raw: Raw, row: u32, block: u32) -> Halves {
    var found = unpack2x16float(raw.scales);
    if (SUPERBLOCKS) {
        let pair = raw.pair >> (16u * (block % 2u));
        found = found * vec2<f32>(f32(pair & 255u), -f32((pair >> 8u) & 255u));
    }
    let s = half_twice(found.x);
    let m = half_twice(found.y);
    let w = raw.w;
    let h = raw.w >> vec4<u32>(4u);
    let f = raw.fifth;
    return Halves(
        vec4<u32>(five_bits(w.x, f, s, m), five_bits(w.y, f >> 4u, s, m)),
        vec4<u32>(five_bits(w.z, f >> 8u, s, m), five_bits(w.w, f >> 12u, s, m)),
        vec4<u32>(five_bits(h.x, f >> 16u, s, m), five_bits(h.y, f >> 20u, s, m)),
        vec4<u32>(five_bits(h.z, f >> 24u, s, m), five_bits(h.w, f >> 28u, s, m)));
}
