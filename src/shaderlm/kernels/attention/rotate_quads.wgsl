// Rotates the quads of a head by a row's position. Exports: INTERLEAVED, partner(i), struct Turn, turn_at(position, i),
// rotate(own, other, turn, i).
// Needs: table, and params.rotary, the quads of a head that are rotated.

const INTERLEAVED: bool = false;  // pairs are 2i and 2i + 1, else i and i + rotary / 2

// Which quad of a head is rotated together with quad i.
fn partner(i: u32) -> u32 {
    let half = params.rotary / 2u;
    return select(i + half, i - half, i >= half);
}

// What quad i of a head is rotated by: (cos, sin) of its pairs.
struct Turn {
    a: vec4<f32>,
    b: vec4<f32>,
}

fn turn_at(position: u32, i: u32) -> Turn {
    let row = position * params.rotary;
    if (INTERLEAVED) {
        let both = table[row + i];  // of pair 2i and of pair 2i + 1
        return Turn(both, both);
    }
    let pair = row + i % max(1u, params.rotary / 2u) * 2u;  // constants may not be divided by 0, even where nobody gets
    return Turn(table[pair], table[pair + 1u]);
}

fn rotate(own: vec4<f32>, other: vec4<f32>, turn: Turn, i: u32) -> vec4<f32> {
    let a = turn.a;
    let b = turn.b;
    if (INTERLEAVED) {
        return vec4<f32>(
            own.x * a.x - own.y * a.y, own.x * a.y + own.y * a.x, own.z * a.z - own.w * a.w, own.z * a.w + own.w * a.z,
        );
    }
    let cos4 = vec4<f32>(a.x, a.z, b.x, b.z);
    let sin4 = vec4<f32>(a.y, a.w, b.y, b.w);
    return own * cos4 + other * select(-sin4, sin4, i >= params.rotary / 2u);
}
