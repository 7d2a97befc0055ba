// apply of swiglu_clamped: g / (1 + exp(−1.702 g)) · (u + 1), g = min(a, 7), u = b between −7 and 7
// As in apply_silu_mul: below −88 the quotient is 0. A comparison keeps NaN, which min and clamp may lose.

fn apply(a: value, b: value) -> value {
    let g = select(a, value(7.0), a > value(7.0));
    let u = select(select(b, value(7.0), b > value(7.0)), value(-7.0), b < value(-7.0));
    let exponent = 1.702 * g;
    let quotient = g / (value(1.0) + exp(-max(exponent, value(-88.0))));
    return select(quotient, value(0.0) * g, exponent < value(-88.0)) * (u + value(1.0));
}
