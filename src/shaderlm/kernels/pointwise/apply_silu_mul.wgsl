// apply of silu_mul: a / (1 + exp(−a)) · b
// Far below zero exp overflows, and what infinity does then is up to the implementation: a is held at −80, where the
// quotient is −1.4e-33.

fn apply(a: value, b: value) -> value {
    let held = max(a, value(-80.0));
    return held / (value(1.0) + exp(-held)) * b;
}
