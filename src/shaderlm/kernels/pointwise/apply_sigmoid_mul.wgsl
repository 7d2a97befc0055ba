// apply of sigmoid_mul: b / (1 + exp(−a))
// For one value or four. As in shared/silu: below −88 it is 0 · b. NaN stays NaN.

fn apply(a: value, b: value) -> value {
    return select(b / (value(1.0) + exp(-max(a, value(-88.0)))), value(0.0) * b, a < value(-88.0));
}
