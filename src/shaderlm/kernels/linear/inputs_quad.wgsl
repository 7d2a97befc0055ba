// A block of x, 32 inputs, loaded once by four threads that all want the same: two quads each, then passed around.
// Exports: load_inputs(at, lane), the block that begins at quad `at` of x. Same function as inputs_each. Call from
// uniform control flow, with the same `at` in lanes 4i … 4i + 3, which a subgroup holds side by side.

struct Inputs {
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
}

fn load_inputs(at: u32, lane: u32) -> Inputs {
    let a = x[at + lane % 4u];
    let b = x[at + 4u + lane % 4u];
    return Inputs(
        quadBroadcast(a, 0u), quadBroadcast(a, 1u), quadBroadcast(a, 2u), quadBroadcast(a, 3u),
        quadBroadcast(b, 0u), quadBroadcast(b, 1u), quadBroadcast(b, 2u), quadBroadcast(b, 3u),
    );
}
