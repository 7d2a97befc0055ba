// int16_dot(weights, first, second, unit): the 32 weights of a block of format q8_0 times 32 inputs of 16 bits;
// unit = (unit, unit · Σ of the first 16 inputs, the same of the others). Needs: Packed of the format, block_dot.

fn int16_dot(p: Packed, first: Sixteen, second: Sixteen, unit: vec3<f32>) -> f32 {
    return p.scale * (block_dot(p.a, p.b, first, second) * unit.x);
}
