// apply of silu_mul: a / (1 + exp(−a)) · b
// As in shared/silu, for one value or four: below −88 the quotient is 0. NaN stays NaN.

fn apply(a: value, b: value) -> value {
    return select(a / (value(1.0) + exp(-max(a, value(-88.0)))) * b, value(0.0) * b, a < value(-88.0));
}
