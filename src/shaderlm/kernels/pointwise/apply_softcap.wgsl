// apply of softcap: number · tanh(x / number). Needs: shared/softcap.

fn apply(x: value) -> value {
    return softcap(x, params.number);
}
