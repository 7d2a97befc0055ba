// Weight formats f16 and bf16 (BF16: the first half of an f32): one vec4<u32> holds 8 weights. No scales. unpack2x16float
// is core WGSL: no f16 feature needed.
// Exports: as shared/format_f32.

const BF16: bool = false;

fn widened(pair: vec2<u32>) -> vec4<f32> {
    if (BF16) {
        return bitcast<vec4<f32>>(vec4<u32>(pair.x << 16u, pair.x & 0xFFFF0000u, pair.y << 16u, pair.y & 0xFFFF0000u));
    }
    return vec4<f32>(unpack2x16float(pair.x), unpack2x16float(pair.y));
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let word = weight[row * (params.k / 8u) + quad / 2u];
    return widened(select(word.xy, word.zw, quad % 2u == 1u));
}

struct Packed {
    a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32>,
}

fn load_block(row: u32, block: u32) -> Packed {
    let i = row * (params.k / 8u) + 4u * block;
    return Packed(weight[i], weight[i + 1u], weight[i + 2u], weight[i + 3u]);
}

fn packed_dot(
    p: Packed,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
) -> f32 {
    return dot(x0, widened(p.a.xy)) + dot(x1, widened(p.a.zw)) + dot(x2, widened(p.b.xy)) + dot(x3, widened(p.b.zw))
        + dot(x4, widened(p.c.xy)) + dot(x5, widened(p.c.zw)) + dot(x6, widened(p.d.xy)) + dot(x7, widened(p.d.zw));
}
