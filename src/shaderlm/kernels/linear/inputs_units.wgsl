// Matrices of inputs that stay in registers. Exports: Inputs, load_inputs(at, stride) of x_half, counted in its
// vec4<u32>; multiply_inputs(inputs, right, sum). Same names as inputs_emulated. Needs: shared/matrix_units, x_half.

alias Inputs = Left;

fn load_inputs(at: u32, stride: u32) -> Inputs {
    return subgroupMatrixLoad<Left, row_major>(&x_half, at, stride);
}

fn multiply_inputs(inputs: Inputs, right: Right, sum: Result) -> Result {
    return multiply(inputs, right, sum);
}
