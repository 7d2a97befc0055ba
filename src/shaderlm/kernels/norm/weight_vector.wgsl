// The weights of a norm, the same for every row. Exports: weight_at(i). Same function as weight_none. Needs: alias value.

@group(0) @binding(0) var<storage, read> weight: array<value>;  // [width]

fn weight_at(i: u32) -> value {
    return weight[i];
}
