// Blocks of 32 weights of formats q4_1 and q4_k as f16, in the order of `Halves`. What was fetched is not looked at
// before it is needed: the kernel fetches a step ahead.
// Exports: Raw, fetch(row, block), block_halves(raw, row, block). Needs: shared/format_q4_min, shared/halves, half arithmetic.

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

fn low_halves(word: u32, scale: u32, minimum: u32) -> vec2<u32> {
    let zero = 0xE400E400u;  // −1024
    return vec2<u32>(
        half_fma(half_add((word & 0x000F000Fu) | HALF_1024, zero), scale, minimum),
        half_fma(half_add(((word >> 8u) & 0x000F000Fu) | HALF_1024, zero), scale, minimum));
}

// The four high nibbles, which are 16 times as large where they lie: q = (1024 + 16 · q) / 16 − 64.
fn high_halves(word: u32, scale: u32, minimum: u32) -> vec2<u32> {
    let sixteenth = 0x2C002C00u;
    let zero = 0xD400D400u;  // −64
    return vec2<u32>(
        half_fma(half_fma((word & 0x00F000F0u) | HALF_1024, sixteenth, zero), scale, minimum),
        half_fma(half_fma(((word >> 8u) & 0x00F000F0u) | HALF_1024, sixteenth, zero), scale, minimum));
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
    return Halves(
        vec4<u32>(low_halves(w.x, s, m), low_halves(w.y, s, m)), vec4<u32>(low_halves(w.z, s, m), low_halves(w.w, s, m)),
        vec4<u32>(high_halves(w.x, s, m), high_halves(w.y, s, m)),
        vec4<u32>(high_halves(w.z, s, m), high_halves(w.w, s, m)));
}
