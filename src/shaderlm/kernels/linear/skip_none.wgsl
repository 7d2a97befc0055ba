// Inputs of a product: x as it is. Exports: begin_inputs(lane, size, workgroup), input_at(i), keep_input(i, value). Same
// functions as skip_rms_norm. Needs: x.

fn begin_inputs(lane: u32, size: u32, workgroup: u32) {
}

fn input_at(i: u32) -> vec4<f32> {
    return x[i];
}

fn keep_input(i: u32, value: vec4<f32>) {
}
