// Blocks of 32 weights of format q4_0 as f16, in the order of `Halves`. What was fetched is not looked at before it is
// needed: the kernel fetches a step ahead.
// Exports: Raw, fetch(row, block), block_halves(raw, row, block). Needs: shared/halves, half arithmetic.

struct Raw {
    w: vec4<u32>,
    scales: u32,  // of two blocks
}

fn fetch(row: u32, block: u32) -> Raw {
    return Raw(weight[row * (params.k / 32u) + block], scales[(row * params.groups + block) / 2u]);
}

// The four low nibbles of a word's bytes, each −8.
fn low_halves(word: u32, scale: u32) -> vec2<u32> {
    let zero = 0xE408E408u;  // −1032
    return vec2<u32>(
        half_multiply(half_add((word & 0x000F000Fu) | HALF_1024, zero), scale),
        half_multiply(half_add(((word >> 8u) & 0x000F000Fu) | HALF_1024, zero), scale));
}

// The four high nibbles, which are 16 times as large where they lie: q − 8 = (1024 + 16 · q) / 16 − 72.
fn high_halves(word: u32, scale: u32) -> vec2<u32> {
    let sixteenth = 0x2C002C00u;
    let zero = 0xD480D480u;  // −72
    return vec2<u32>(
        half_multiply(half_fma((word & 0x00F000F0u) | HALF_1024, sixteenth, zero), scale),
        half_multiply(half_fma(((word >> 8u) & 0x00F000F0u) | HALF_1024, sixteenth, zero), scale));
}

fn block_halves(raw: Raw, row: u32, block: u32) -> Halves {
    let s = half_twice(unpack2x16float(raw.scales)[(row * params.groups + block) % 2u]);
    let w = raw.w;
    return Halves(
        vec4<u32>(low_halves(w.x, s), low_halves(w.y, s)), vec4<u32>(low_halves(w.z, s), low_halves(w.w, s)),
        vec4<u32>(high_halves(w.x, s), high_halves(w.y, s)), vec4<u32>(high_halves(w.z, s), high_halves(w.w, s)));
}
