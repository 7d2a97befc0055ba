// Blocks of 32 weights of format f32 as f16, in the order of `Halves`. Weights beyond 65504 do not fit.
// Exports: Raw, fetch(row, block), block_halves(raw, row, block). Needs: shared/format_f32, shared/halves.

alias Raw = Packed;

fn fetch(row: u32, block: u32) -> Raw {
    return load_block(row, block);
}

fn block_halves(raw: Raw, row: u32, block: u32) -> Halves {
    return Halves(
        vec4<u32>(quad_halves(raw.a), quad_halves(raw.b)), vec4<u32>(quad_halves(raw.c), quad_halves(raw.d)),
        vec4<u32>(quad_halves(raw.e), quad_halves(raw.f)), vec4<u32>(quad_halves(raw.g), quad_halves(raw.h)));
}
