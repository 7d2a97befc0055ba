// Weights of formats f16 and bf16 as f16: see shared/dequant_f16. Needs: shared/format_f16. Weights beyond 65504 do not
// fit.

struct Raw {
    a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32>,
}

fn fetch(row: u32, block: u32) -> Raw {
    let i = row * (params.k / 8u) + 4u * block;
    return Raw(weight[i], weight[i + 1u], weight[i + 2u], weight[i + 3u]);
}

fn eight_halves(raw: Raw, row: u32, block: u32, part: u32) -> vec4<u32> {
    let w = select(select(raw.a, raw.b, part == 1u), select(raw.c, raw.d, part == 3u), part >= 2u);
    if (BF16) {
        return vec4<u32>(quad_halves(widened(w.xy)), quad_halves(widened(w.zw)));
    }
    return vec4<u32>(
        (w.x & 0xFFFFu) | (w.y << 16u), (w.x >> 16u) | (w.y & 0xFFFF0000u),
        (w.z & 0xFFFFu) | (w.w << 16u), (w.z >> 16u) | (w.w & 0xFFFF0000u));
}
