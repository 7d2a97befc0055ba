// Blocks of 32 weights of format f16, in the order of `Halves`.
// Exports: Raw, fetch(row, block), block_halves(raw, row, block). Needs: shared/format_f16, shared/halves.

alias Raw = Packed;

fn fetch(row: u32, block: u32) -> Raw {
    return load_block(row, block);
}

fn reordered(w: vec4<u32>) -> vec4<u32> {
    return vec4<u32>(
        (w.x & 0xFFFFu) | (w.y << 16u), (w.x >> 16u) | (w.y & 0xFFFF0000u),
        (w.z & 0xFFFFu) | (w.w << 16u), (w.z >> 16u) | (w.w & 0xFFFF0000u));
}

fn block_halves(raw: Raw, row: u32, block: u32) -> Halves {
    return Halves(reordered(raw.a), reordered(raw.b), reordered(raw.c), reordered(raw.d));
}
