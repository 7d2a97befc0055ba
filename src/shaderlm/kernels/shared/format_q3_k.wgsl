// Weight format q3_k: three vec4<u32> hold 128 weights, q + 4 in 3 bits; w = d · s · q, s per 16 and d per 256 weights.
// The first two hold the low bits of 64 weights each, two u32 for each 32 weights: bits 2i of byte j in u32 h belong to
// weight 16h + 4i + j. The third has a u32 of high bits for each 32 weights: bit i of byte j belongs to weight 4i + j.
// Scales: per 256 weights four u32: of the s + 32 of 16 weights each, 16 times four low bits and 16 times two high bits;
// then d as f16.
// Exports: as shared/format_f32.

// What is stored for the scales of a block: low bits of those of four blocks, high bits of all, d.
fn stored_scales(row: u32, block: u32) -> vec3<u32> {
    let i = 4u * (row * params.groups + block / 8u);
    return vec3<u32>(scales[i + block % 8u / 4u], scales[i + 2u], scales[i + 3u]);
}

// d · s of the two halves of a block.
fn scales_of(stored: vec3<u32>, block: u32) -> vec2<f32> {
    let low = stored.x >> (8u * (block % 4u));
    let high = stored.y >> (4u * (block % 8u));
    let s = vec2<u32>((low & 15u) | ((high & 3u) << 4u), ((low >> 4u) & 15u) | ((high & 12u) << 2u));
    return unpack2x16float(stored.z).x * (vec2<f32>(s) - 32.0);
}

// Four weights q + 4 as bytes, of the lowest two bits and the lowest bit of each byte.
fn three_bits(low: u32, high: u32) -> u32 {
    return (low & 0x03030303u) | ((high & 0x01010101u) << 2u);
}

fn numbers(low: u32, high: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(three_bits(low, high))) - 4.0;
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let block = quad / 8u;
    let i = row * (params.k / 128u * 3u) + block / 4u * 3u;
    let half = quad / 4u % 2u;
    let low = weight[i + block % 4u / 2u][block % 2u * 2u + half] >> (2u * (quad % 4u));
    let high = weight[i + 2u][block % 4u] >> (quad % 8u);
    return numbers(low, high) * scales_of(stored_scales(row, block), block)[half];
}

struct Packed {
    low: vec2<u32>,
    high: u32,
    scale: vec2<f32>,
}

fn low_bits(row: u32, block: u32) -> vec2<u32> {
    let both = weight[row * (params.k / 128u * 3u) + block / 4u * 3u + block % 4u / 2u];
    return select(both.xy, both.zw, block % 2u == 1u);
}

fn high_bits(row: u32, block: u32) -> u32 {
    return weight[row * (params.k / 128u * 3u) + block / 4u * 3u + 2u][block % 4u];
}

fn load_block(row: u32, block: u32) -> Packed {
    return Packed(low_bits(row, block), high_bits(row, block), scales_of(stored_scales(row, block), block));
}

fn packed_dot(
    p: Packed,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
) -> f32 {
    let l = p.low;
    let h = p.high;
    let first = dot(x0, numbers(l.x, h)) + dot(x1, numbers(l.x >> 2u, h >> 1u))
        + dot(x2, numbers(l.x >> 4u, h >> 2u)) + dot(x3, numbers(l.x >> 6u, h >> 3u));
    let second = dot(x4, numbers(l.y, h >> 4u)) + dot(x5, numbers(l.y >> 2u, h >> 5u))
        + dot(x6, numbers(l.y >> 4u, h >> 6u)) + dot(x7, numbers(l.y >> 6u, h >> 7u));
    return first * p.scale.x + second * p.scale.y;
}
