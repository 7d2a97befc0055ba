// int16_dot of format q6_k: see shared/int16. Needs: Packed of the format, sixteen_dot.

// Sixteen weights q + 32, of their low nibbles and the two bits above each.
fn six_bit_bytes(low: vec4<u32>, high: u32) -> vec4<u32> {
    let above = vec4<u32>(high << 4u, high << 2u, high, high >> 2u) & vec4<u32>(0x30303030u);
    return (low & vec4<u32>(0x0F0F0F0Fu)) | above;
}

fn int16_dot(p: Packed, first: Sixteen, second: Sixteen, unit: vec3<f32>) -> f32 {
    let a = sixteen_dot(six_bit_bytes(p.low, p.high.x), first) * unit.x - 32.0 * unit.y;
    let b = sixteen_dot(six_bit_bytes(p.low >> vec4<u32>(4u), p.high.y), second) * unit.x - 32.0 * unit.z;
    return p.scale.x * a + p.scale.y * b;
}
