// A block of x, 32 inputs, loaded by each thread for itself.
// Exports: load_inputs(at, lane), the block that begins at quad `at` of x. Same function as inputs_quad.

struct Inputs {
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
}

fn load_inputs(at: u32, lane: u32) -> Inputs {
    return Inputs(x[at], x[at + 1u], x[at + 2u], x[at + 3u], x[at + 4u], x[at + 5u], x[at + 6u], x[at + 7u]);
}
