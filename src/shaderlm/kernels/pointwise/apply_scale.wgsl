// apply of scale: number · x

fn apply(x: value) -> value {
    return params.number * x;
}
