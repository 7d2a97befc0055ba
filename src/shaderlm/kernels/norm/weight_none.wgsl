// A norm without weights. Exports: weight_at(i). Same function as weight_vector. Needs: alias value.

fn weight_at(i: u32) -> value {
    return value(1.0);
}
