// apply of mul: a · b

fn apply(a: value, b: value) -> value {
    return a * b;
}
