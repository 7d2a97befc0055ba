// Weight format q8_0: one vec4<u32> holds 16 signed bytes; a scale per 32 weights.
// Exports: as shared/format_f32, and packed_bytes(those), 32 signed bytes of which ZERO_POINT is to be taken off.

fn scale_at(i: u32) -> f32 {
    return unpack2x16float(scales[i / 2u])[i % 2u];
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let word = weight[row * (params.k / 16u) + quad / 4u][quad % 4u];
    return vec4<f32>(unpack4xI8(word)) * scale_at(row * params.groups + quad / 8u);
}

struct Packed {
    a: vec4<u32>, b: vec4<u32>,
    scale: f32,
}

fn load_block(row: u32, block: u32) -> Packed {
    let i = row * (params.k / 16u) + 2u * block;
    return Packed(weight[i], weight[i + 1u], scale_at(row * params.groups + block));
}

fn packed_dot(
    p: Packed,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
) -> f32 {
    let sum = dot(x0, vec4<f32>(unpack4xI8(p.a.x))) + dot(x1, vec4<f32>(unpack4xI8(p.a.y)))
        + dot(x2, vec4<f32>(unpack4xI8(p.a.z))) + dot(x3, vec4<f32>(unpack4xI8(p.a.w)))
        + dot(x4, vec4<f32>(unpack4xI8(p.b.x))) + dot(x5, vec4<f32>(unpack4xI8(p.b.y)))
        + dot(x6, vec4<f32>(unpack4xI8(p.b.z))) + dot(x7, vec4<f32>(unpack4xI8(p.b.w)));
    return sum * p.scale;
}

const ZERO_POINT: i32 = 0;

struct Bytes {
    a: vec4<u32>,  // weights 0 … 15, four a word
    b: vec4<u32>,  // weights 16 … 31
}

fn packed_bytes(p: Packed) -> Bytes {
    return Bytes(p.a, p.b);
}
