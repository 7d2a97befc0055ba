// Blocks of 32 weights of format q8_0 as f16, in the order of `Halves`. What was fetched is not looked at before it is
// needed: the kernel fetches a step ahead.
// Exports: Raw, fetch(row, block), block_halves(raw, row, block). Needs: shared/halves, half arithmetic.

struct Raw {
    a: vec4<u32>, b: vec4<u32>,
    scales: u32,  // of two blocks
}

fn fetch(row: u32, block: u32) -> Raw {
    let i = row * (params.k / 16u) + 2u * block;
    return Raw(weight[i], weight[i + 1u], scales[(row * params.groups + block) / 2u]);
}

// Bytes 0 and 2 of a word, bytes 1 and 3; −128 … 127 is 0 … 255 with the first bit turned.
fn byte_halves(word: u32, scale: u32) -> vec2<u32> {
    let bytes = word ^ 0x80808080u;
    let zero = 0xE480E480u;  // −1152
    return vec2<u32>(
        half_multiply(half_add((bytes & 0x00FF00FFu) | HALF_1024, zero), scale),
        half_multiply(half_add(((bytes >> 8u) & 0x00FF00FFu) | HALF_1024, zero), scale));
}

fn eight_bytes(x: u32, y: u32, scale: u32) -> vec4<u32> {
    return vec4<u32>(byte_halves(x, scale), byte_halves(y, scale));
}

fn block_halves(raw: Raw, row: u32, block: u32) -> Halves {
    let scale = half_twice(unpack2x16float(raw.scales)[(row * params.groups + block) % 2u]);
    return Halves(
        eight_bytes(raw.a.x, raw.a.y, scale), eight_bytes(raw.a.z, raw.a.w, scale),
        eight_bytes(raw.b.x, raw.b.y, scale), eight_bytes(raw.b.z, raw.b.w, scale));
}
