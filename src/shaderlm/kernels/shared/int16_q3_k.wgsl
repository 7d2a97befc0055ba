// int16_dot of format q3_k: see shared/int16. Needs: Packed of the format, sixteen_dot.

// Sixteen weights q + 4, of their low bits and the bit above each.
fn three_bit_bytes(low: u32, high: u32) -> vec4<u32> {
    let shift = vec4<u32>(0u, 1u, 2u, 3u);
    let above = (vec4<u32>(high) >> shift) & vec4<u32>(0x01010101u);
    return ((vec4<u32>(low) >> (2u * shift)) & vec4<u32>(0x03030303u)) | (above << vec4<u32>(2u));
}

fn int16_dot(p: Packed, first: Sixteen, second: Sixteen, unit: vec3<f32>) -> f32 {
    let a = sixteen_dot(three_bit_bytes(p.low.x, p.high), first) * unit.x - 4.0 * unit.y;
    let b = sixteen_dot(three_bit_bytes(p.low.y, p.high >> 4u), second) * unit.x - 4.0 * unit.z;
    return p.scale.x * a + p.scale.y * b;
}
