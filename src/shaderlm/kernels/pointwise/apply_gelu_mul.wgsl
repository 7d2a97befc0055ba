// apply of gelu_mul: gelu(a) · b. Needs: shared/gelu.

fn apply(a: value, b: value) -> value {
    return gelu(a) * b;
}
