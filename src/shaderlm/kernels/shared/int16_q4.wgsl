// int16_dot(weights, first, second, unit): the 32 weights of a block of format q4 times 32 inputs of 16 bits;
// unit = (unit, unit · Σ of the first 16 inputs, the same of the others). Needs: Packed of the format, block_dot.

fn int16_dot(p: Packed, first: Sixteen, second: Sixteen, unit: vec3<f32>) -> f32 {
    let sum = block_dot(p.w & vec4<u32>(0x0F0F0F0Fu), (p.w >> vec4<u32>(4u)) & vec4<u32>(0x0F0F0F0Fu), first, second);
    return p.scale * (sum * unit.x - 8.0 * (unit.y + unit.z));
}
