// What becomes of a norm: nothing else. Exports: beside_at(i), finish(beside, normed). Same functions as finish_add and
// finish_gate. Needs: alias value.

fn beside_at(i: u32) -> value {
    return value(0.0);
}

fn finish(beside: value, normed: value) -> value {
    return normed;
}
