// Weight format q6_k: three vec4<u32> hold 64 weights, q + 32 in 6 bits; w = d · s · q, s per 16 and d per 256 weights.
// The first two hold the low nibbles of 32 weights each, byte j of component c: low nibble = weight 4c + j, high
// nibble = weight 16 + 4c + j. The third has the high bits, two u32 for each 32 weights: bits 2i of byte j in u32 h
// belong to weight 16h + 4i + j. Scales: per 256 weights five u32, 16 signed bytes s and d as f16.
// Exports: as shared/format_f32.

// d · s of the two halves of a block.
fn scales_at(row: u32, block: u32) -> vec2<f32> {
    let i = (row * params.groups + block / 8u) * 5u;
    let pair = scales[i + block % 8u / 2u] >> (16u * (block % 2u));
    return vec2<f32>(unpack4xI8(pair).xy) * unpack2x16float(scales[i + 4u]).x;
}

fn six_bits(low: u32, high: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8((low & 0x0F0F0F0Fu) | ((high & 0x03030303u) << 4u))) - 32.0;
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let block = quad / 8u;
    let i = row * (params.k / 64u * 3u) + block / 2u * 3u;
    let half = quad / 4u % 2u;
    let low = weight[i + block % 2u][quad % 4u] >> (4u * half);
    let high = weight[i + 2u][block % 2u * 2u + half] >> (2u * (quad % 4u));
    return six_bits(low, high) * scales_at(row, block)[half];
}

struct Packed {
    low: vec4<u32>,
    high: vec2<u32>,
    scale: vec2<f32>,
}

fn load_block(row: u32, block: u32) -> Packed {
    let i = row * (params.k / 64u * 3u) + block / 2u * 3u;
    let high = weight[i + 2u];
    return Packed(weight[i + block % 2u], select(high.xy, high.zw, block % 2u == 1u), scales_at(row, block));
}

fn packed_dot(
    p: Packed,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
) -> f32 {
    let l = p.low;
    let h = p.low >> vec4<u32>(4u);
    let first = dot(x0, six_bits(l.x, p.high.x)) + dot(x1, six_bits(l.y, p.high.x >> 2u))
        + dot(x2, six_bits(l.z, p.high.x >> 4u)) + dot(x3, six_bits(l.w, p.high.x >> 6u));
    let second = dot(x4, six_bits(h.x, p.high.y)) + dot(x5, six_bits(h.y, p.high.y >> 2u))
        + dot(x6, six_bits(h.z, p.high.y >> 4u)) + dot(x7, six_bits(h.w, p.high.y >> 6u));
    return first * p.scale.x + second * p.scale.y;
}
