// int8_dot(weights, low, high, unit): the 32 weights of a block of format q6_k times 32 inputs in bytes, `low` and `high`;
// unit = (unit, unit · Σ of the bytes of low, the same of high). Needs: Packed of the format, bytes_dot.

// Sixteen weights q + 32, of their low nibbles and the two bits above each, times sixteen bytes.
fn sixteen(low: vec4<u32>, high: u32, inputs: vec4<u32>) -> f32 {
    let above = vec4<u32>(high << 4u, high << 2u, high, high >> 2u) & vec4<u32>(0x30303030u);
    return f32(bytes_dot((low & vec4<u32>(0x0F0F0F0Fu)) | above, inputs));
}

fn int8_dot(p: Packed, low: vec4<u32>, high: vec4<u32>, unit: vec3<f32>) -> f32 {
    let first = sixteen(p.low, p.high.x, low) * unit.x - 32.0 * unit.y;
    let second = sixteen(p.low >> vec4<u32>(4u), p.high.y, high) * unit.x - 32.0 * unit.z;
    return p.scale.x * first + p.scale.y * second;
}
