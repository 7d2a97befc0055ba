// int8_dot(weights, low, high, unit): the 32 weights of a block of format q4 times 32 inputs in bytes, `low` and `high`;
// unit = (unit, unit · Σ of the bytes of low, the same of high). Needs: Packed of the format, bytes_dot.

fn int8_dot(p: Packed, low: vec4<u32>, high: vec4<u32>, unit: vec3<f32>) -> f32 {
    let sum = bytes_dot(p.w & vec4<u32>(0x0F0F0F0Fu), low) + bytes_dot((p.w >> vec4<u32>(4u)) & vec4<u32>(0x0F0F0F0Fu), high);
    return p.scale * (f32(sum) * unit.x - 8.0 * (unit.y + unit.z));
}
