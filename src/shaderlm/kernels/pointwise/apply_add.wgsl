// apply of add: a + b

fn apply(a: value, b: value) -> value {
    return a + b;
}
