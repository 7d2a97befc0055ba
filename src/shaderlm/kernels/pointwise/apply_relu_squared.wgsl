// apply of relu_squared: max(x, 0)². NaN stays NaN.

fn apply(x: value) -> value {
    return select(x * x, value(0.0), x < value(0.0));
}
