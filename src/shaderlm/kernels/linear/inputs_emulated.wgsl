// The same as inputs_units in plain WGSL: inputs say where they lie in x_half. Needs: shared/matrix_emulated, x_half.

alias Inputs = Place;

fn load_inputs(at: u32, stride: u32) -> Inputs {
    return Place(at, stride);
}

fn multiply_inputs(inputs: Inputs, right: Right, sum: Result) -> Result {
    var found = sum;
    for (var i = 0u; i < RESULT_VALUES; i = i + 1u) {
        let e = i * SUBGROUP + lane_of_subgroup;
        for (var k = 0u; k < MATRIX_K / 2u; k = k + 1u) {
            let left = unpack2x16float(x_half[inputs.at + e / MATRIX_N * inputs.stride + k / 4u][k % 4u]);
            found[i] = found[i] + dot(left, pair_at(right.at + e % MATRIX_N * right.stride, k));
        }
    }
    return found;
}
