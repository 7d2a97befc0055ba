// Weight format f32: one vec4<u32> holds 4 weights. No scales.
// Exports: weight4(row, quad), four weights from k = 4·quad; load_block(row, block), the 32 weights from
// k = 32·block as they lie; packed_dot(those, x0 … x7), their dot product with x.

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(weight[row * (params.k / 4u) + quad]);
}

struct Packed {
    a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>,
    e: vec4<f32>, f: vec4<f32>, g: vec4<f32>, h: vec4<f32>,
}

fn load_block(row: u32, block: u32) -> Packed {
    let quad = 8u * block;
    return Packed(
        weight4(row, quad), weight4(row, quad + 1u), weight4(row, quad + 2u), weight4(row, quad + 3u),
        weight4(row, quad + 4u), weight4(row, quad + 5u), weight4(row, quad + 6u), weight4(row, quad + 7u),
    );
}

fn packed_dot(
    p: Packed,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
) -> f32 {
    return dot(x0, p.a) + dot(x1, p.b) + dot(x2, p.c) + dot(x3, p.d)
        + dot(x4, p.e) + dot(x5, p.f) + dot(x6, p.g) + dot(x7, p.h);
}
