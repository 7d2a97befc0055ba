// Where round_rows has its inputs from: x. Exports: load_x(row, quad), load_again(row, quad). Same as x_of_parts.

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;  // [tokens, quads]

fn load_x(row: u32, quad: u32) -> vec4<f32> {
    return x[row * params.quads + quad];
}

fn load_again(row: u32, quad: u32) -> vec4<f32> {
    return load_x(row, quad);
}
