// Weight format q2_k: one vec4<u32> holds 64 weights, q in 2 bits; w = scale · q + minimum, both per 16.
// Two u32 for each 32 weights: bits 2i of byte j in u32 h belong to weight 16h + 4i + j.
// Scales: per 256 weights five u32, 16 bytes with s in the low nibble and m in the high one, then d and dmin as f16;
// the scale is d · s, the minimum −dmin · m.
// Exports: as shared/format_f32.

// What is stored for the scales of a block: s and m of two blocks; d and dmin.
fn stored_scales(row: u32, block: u32) -> vec2<u32> {
    let i = 5u * (row * params.groups + block / 8u);
    return vec2<u32>(scales[i + block % 8u / 2u], scales[i + 4u]);
}

// Scale and minimum of the first half of a block, then of the second.
fn scales_of(stored: vec2<u32>, block: u32) -> vec4<f32> {
    let pair = stored.x >> (16u * (block % 2u));
    let nibbles = vec4<u32>(pair, pair >> 4u, pair >> 8u, pair >> 12u) & vec4<u32>(15u);
    let d = unpack2x16float(stored.y) * vec2<f32>(1.0, -1.0);
    return vec4<f32>(nibbles) * d.xyxy;
}

fn numbers(low: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(low & 0x03030303u));
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let block = quad / 8u;
    let half = quad / 4u % 2u;
    let low = weight[row * (params.k / 64u) + block / 2u][block % 2u * 2u + half] >> (2u * (quad % 4u));
    let both = scales_of(stored_scales(row, block), block);
    let scale = select(both.xy, both.zw, half == 1u);
    return numbers(low) * scale.x + scale.y;
}

struct Packed {
    low: vec2<u32>,
    scale: vec4<f32>,  // and minimum, of each half
}

fn low_bits(row: u32, block: u32) -> vec2<u32> {
    let both = weight[row * (params.k / 64u) + block / 2u];
    return select(both.xy, both.zw, block % 2u == 1u);
}

fn load_block(row: u32, block: u32) -> Packed {
    return Packed(low_bits(row, block), scales_of(stored_scales(row, block), block));
}

fn packed_dot(
    p: Packed,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
) -> f32 {
    let l = p.low;
    let first = dot(x0, numbers(l.x)) + dot(x1, numbers(l.x >> 2u))
        + dot(x2, numbers(l.x >> 4u)) + dot(x3, numbers(l.x >> 6u));
    let second = dot(x4, numbers(l.y)) + dot(x5, numbers(l.y >> 2u))
        + dot(x6, numbers(l.y >> 4u)) + dot(x7, numbers(l.y >> 6u));
    // Σ x is the same for every row: once inlined, a compiler computes it once.
    let ones = vec2<f32>(dot((x0 + x1) + (x2 + x3), vec4<f32>(1.0)), dot((x4 + x5) + (x6 + x7), vec4<f32>(1.0)));
    return (first * p.scale.x + ones.x * p.scale.y) + (second * p.scale.z + ones.y * p.scale.w);
}
