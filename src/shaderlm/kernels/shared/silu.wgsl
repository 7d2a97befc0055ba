// silu(a) = a / (1 + exp(−a))
// Below −88 exp overflows, and what infinity does then is up to the implementation; the quotient is 0 to f32's precision
// there. NaN stays NaN. Exports: silu(a).

fn silu(a: f32) -> f32 {
    return select(a / (1.0 + exp(-max(a, -88.0))), 0.0, a < -88.0);
}
