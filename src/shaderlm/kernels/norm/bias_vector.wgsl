// The bias of a norm, the same for every row. Exports: bias_at(i). Same function as bias_none. Needs: alias value.

@group(0) @binding(0) var<storage, read> bias: array<value>;  // [width]

fn bias_at(i: u32) -> value {
    return bias[i];
}
