// int16_dot of format q4 or codes: see shared/int16. Needs: Packed, packed_bytes and ZERO_POINT of the format, block_dot.

fn int16_dot(p: Packed, first: Sixteen, second: Sixteen, unit: vec3<f32>) -> f32 {
    let q = packed_bytes(p);
    let sum = block_dot(q.a, q.b, first, second) * unit.x;
    if (ZERO_POINT == 0) {
        return p.scale * sum;
    }
    return p.scale * (sum - f32(ZERO_POINT) * (unit.y + unit.z));
}
