// Inputs of a product: a row of x as it is. Exports: begin_inputs(lane, size, workgroup), input_at(i), keep_input(i, value). Same
// functions as skip_rms_norm. Needs: x, x_row, params.k.

fn begin_inputs(lane: u32, size: u32, workgroup: u32) {
}

fn input_at(i: u32) -> vec4<f32> {
    return x[x_row() * (params.k / 4u) + i];
}

fn keep_input(i: u32, value: vec4<f32>) {
}
