// int16_dot of format q2_k: see shared/int16. Needs: Packed of the format, sixteen_dot.

fn two_bit_bytes(low: u32) -> vec4<u32> {
    return vec4<u32>(low, low >> 2u, low >> 4u, low >> 6u) & vec4<u32>(0x03030303u);
}

fn int16_dot(p: Packed, first: Sixteen, second: Sixteen, unit: vec3<f32>) -> f32 {
    let a = p.scale.x * (sixteen_dot(two_bit_bytes(p.low.x), first) * unit.x) + p.scale.y * unit.y;
    let b = p.scale.z * (sixteen_dot(two_bit_bytes(p.low.y), second) * unit.x) + p.scale.w * unit.z;
    return a + b;
}
