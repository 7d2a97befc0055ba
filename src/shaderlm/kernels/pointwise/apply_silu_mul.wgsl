// apply of silu_mul: a / (1 + exp(−a)) · b
// Below −88 exp overflows, and what infinity does then is up to the implementation; the quotient is 0 to f32's
// precision there. NaN stays NaN.

fn apply(a: value, b: value) -> value {
    return select(a / (value(1.0) + exp(-max(a, value(-88.0)))) * b, value(0.0) * b, a < value(-88.0));
}
