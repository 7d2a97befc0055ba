// Heads rotated by the angles of row t: (u, v) → (u·cos − v·sin, u·sin + v·cos), i with i + rotary / 2, which is a multiple
// of four. Needs: x, params.half. Exports: turned_quad(base, quad, t): a quad of the head that begins at quad base of x.
// Same as turns_none.

@group(0) @binding(0) var<storage, read> table: array<vec4<f32>>;  // [tokens, rotary / 4] of (cos, sin, cos, sin)

fn turned_quad(base: u32, quad: u32, t: u32) -> vec4<f32> {
    let own = x[base + quad];
    if (quad >= 2u * params.half) {
        return own;
    }
    let first = quad < params.half;
    let other = x[base + select(quad - params.half, quad + params.half, first)];
    let at = 2u * (t * params.half + quad % params.half);
    let low = table[at];
    let high = table[at + 1u];
    let sines = vec4<f32>(low.yw, high.yw);
    return own * vec4<f32>(low.xz, high.xz) + other * select(sines, -sines, first);
}
