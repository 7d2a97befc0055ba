// int16_dot of format q4_1 or q4_k: see shared/int16. Needs: Packed of the format, block_dot.

fn int16_dot(p: Packed, first: Sixteen, second: Sixteen, unit: vec3<f32>) -> f32 {
    let sum = block_dot(p.w & vec4<u32>(0x0F0F0F0Fu), (p.w >> vec4<u32>(4u)) & vec4<u32>(0x0F0F0F0Fu), first, second);
    return p.scale.x * (sum * unit.x) + p.scale.y * (unit.y + unit.z);
}
