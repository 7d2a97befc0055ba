// gelu(x) = x / 2 · (1 + tanh(√(2 / π) · (x + 0.044715 x³))), which is x / (1 + exp(−2 √(2 / π) · (x + 0.044715 x³)))
// As in silu: below −88 exp overflows, and the quotient is 0 to f32's precision. So that x³ does not, x² is bounded where
// the quotient is x or 0 anyway. NaN stays NaN. Exports: gelu(x). Needs: alias value, f32 or vec4<f32>.

fn gelu(x: value) -> value {
    let exponent = 1.5957691 * x * (value(1.0) + 0.044715 * min(x * x, value(1e4)));
    return select(x / (value(1.0) + exp(-max(exponent, value(-88.0)))), value(0.0) * x, exponent < value(-88.0));
}
