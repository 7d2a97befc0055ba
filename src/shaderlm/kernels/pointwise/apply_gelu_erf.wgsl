// apply of gelu_erf. Needs: shared/gelu_erf.

fn apply(x: value) -> value {
    return gelu_erf(x);
}
