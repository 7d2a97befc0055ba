// apply of silu_mul: a / (1 + exp(−a)) · b
// For a below about −88 exp overflows to infinity and the quotient is −0, which is right to f32's precision;
// an implementation may also give NaN there, so the exponent is held at 80, where the quotient is < 2e-33.

fn apply(a: value, b: value) -> value {
    return a / (value(1.0) + exp(min(-a, value(80.0)))) * b;
}
