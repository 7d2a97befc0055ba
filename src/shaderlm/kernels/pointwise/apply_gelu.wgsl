// apply of gelu. Needs: shared/gelu.

fn apply(x: value) -> value {
    return gelu(x);
}
