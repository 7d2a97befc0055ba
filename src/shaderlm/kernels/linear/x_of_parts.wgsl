// Where round_rows has its inputs from: parts of k of the product before it, added up as linear_matrix_merge does, plus what
// that product adds to its results. x is stored for those who read it later.
// Exports: load_x(row, quad), load_again(row, quad): a quad that this thread has loaded before. Same as x_given.

@group(0) @binding(0) var<storage, read> x_parts: array<vec4<f32>>;  // [split, tokens, quads]
@group(0) @binding(1) var<storage, read> x_scale: array<f32>;        // [tokens], what sums of a row are multiplied by
@group(0) @binding(2) var<storage, read> added: array<vec4<f32>>;    // [tokens, quads] if params.adds
@group(0) @binding(3) var<storage, read_write> x: array<vec4<f32>>;  // [tokens, quads]

fn load_x(row: u32, quad: u32) -> vec4<f32> {
    let at = row * params.quads + quad;
    var sums = vec4<f32>();
    for (var part = 0u; part < params.split; part = part + 1u) {
        sums = sums + x_parts[part * params.tokens * params.quads + at];
    }
    var value = sums * x_scale[row];
    if (params.adds != 0u) {
        value = added[at] + value;
    }
    x[at] = value;
    return value;
}

fn load_again(row: u32, quad: u32) -> vec4<f32> {
    return x[row * params.quads + quad];
}
