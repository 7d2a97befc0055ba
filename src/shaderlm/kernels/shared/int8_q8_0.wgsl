// int8_dot(weights, low, high, unit): the 32 weights of a block of format q8_0 times 32 inputs in bytes, `low` and `high`;
// unit = (unit, unit · Σ of the bytes of low, the same of high). Needs: Packed of the format, bytes_dot.

fn int8_dot(p: Packed, low: vec4<u32>, high: vec4<u32>, unit: vec3<f32>) -> f32 {
    return p.scale * (f32(bytes_dot(p.a, low) + bytes_dot(p.b, high)) * unit.x);
}
