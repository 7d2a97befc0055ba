// A norm without a bias. Exports: bias_at(i). Same function as bias_vector. Needs: alias value.

fn bias_at(i: u32) -> value {
    return value(0.0);
}
