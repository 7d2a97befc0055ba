// Weights of format f32 as f16: see shared/dequant_f16. Weights beyond 65504 do not fit.

struct Raw {
    a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32>,
    e: vec4<u32>, f: vec4<u32>, g: vec4<u32>, h: vec4<u32>,
}

fn fetch(row: u32, block: u32) -> Raw {
    let i = row * (params.k / 4u) + 8u * block;
    return Raw(
        weight[i], weight[i + 1u], weight[i + 2u], weight[i + 3u],
        weight[i + 4u], weight[i + 5u], weight[i + 6u], weight[i + 7u],
    );
}

fn two_quads(x: vec4<u32>, y: vec4<u32>) -> vec4<u32> {
    return vec4<u32>(quad_halves(bitcast<vec4<f32>>(x)), quad_halves(bitcast<vec4<f32>>(y)));
}

fn eight_halves(raw: Raw, row: u32, block: u32, part: u32) -> vec4<u32> {
    if (part < 2u) {
        return two_quads(select(raw.a, raw.c, part == 1u), select(raw.b, raw.d, part == 1u));
    }
    return two_quads(select(raw.e, raw.g, part == 3u), select(raw.f, raw.h, part == 3u));
}
