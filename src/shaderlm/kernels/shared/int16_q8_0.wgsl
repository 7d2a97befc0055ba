// int16_dot(weights, first, second, unit): the 32 weights of a block of format q8_0 times 32 inputs of 16 bits;
// unit = (unit, unit · Σ of the first 16 inputs, the same of the others). Needs: Packed of the format, sixteen_dot.

fn int16_dot(p: Packed, first: Sixteen, second: Sixteen, unit: vec3<f32>) -> f32 {
    return p.scale * ((sixteen_dot(p.a, first) + sixteen_dot(p.b, second)) * unit.x);
}
