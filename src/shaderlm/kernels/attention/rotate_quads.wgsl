// Rotates the quads of a head by a row's position. Exports: INTERLEAVED, partner(i), rotate(own, other, position, i).
// Needs: table, and params.rotary, the quads of a head that are rotated.

const INTERLEAVED: bool = false;  // pairs are 2i and 2i + 1, else i and i + rotary / 2

// Which quad of a head is rotated together with quad i.
fn partner(i: u32) -> u32 {
    let half = params.rotary / 2u;
    return select(i + half, i - half, i >= half);
}

fn rotate(own: vec4<f32>, other: vec4<f32>, position: u32, i: u32) -> vec4<f32> {
    let row = position * params.rotary;
    if (INTERLEAVED) {
        let turn = table[row + i];  // (cos, sin) of pair 2i and of pair 2i + 1
        return vec4<f32>(
            own.x * turn.x - own.y * turn.y, own.x * turn.y + own.y * turn.x,
            own.z * turn.z - own.w * turn.w, own.z * turn.w + own.w * turn.z,
        );
    }
    let half = params.rotary / 2u;
    let pair = row + i % half * 2u;
    let a = table[pair];
    let b = table[pair + 1u];
    let cos4 = vec4<f32>(a.x, a.z, b.x, b.z);
    let sin4 = vec4<f32>(a.y, a.w, b.y, b.w);
    return own * cos4 + other * select(-sin4, sin4, i >= half);
}
