// int16_dot of format q8_0: see shared/int16. Needs: Packed of the format, block_dot.

fn int16_dot(p: Packed, first: Sixteen, second: Sixteen, unit: vec3<f32>) -> f32 {
    return p.scale * (block_dot(p.a, p.b, first, second) * unit.x);
}
