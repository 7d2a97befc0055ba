// int16_dot(weights, first, second, unit): the 32 weights of a block of format q4 or codes times 32 inputs of 16 bits;
// unit = (unit, unit · Σ of the first 16 inputs, the same of the others). Needs: Packed, packed_bytes and
// ZERO_POINT of the format, block_dot.

fn int16_dot(p: Packed, first: Sixteen, second: Sixteen, unit: vec3<f32>) -> f32 {
    let q = packed_bytes(p);
    let sum = block_dot(q.a, q.b, first, second) * unit.x;
    if (ZERO_POINT == 0) {
        return p.scale * sum;
    }
    return p.scale * (sum - f32(ZERO_POINT) * (unit.y + unit.z));
}
