// The input of a norm: x. Exports: input_at(i), keep_input(i, v), which does nothing. Same functions as input_sum.
// Needs: alias value, f32 or vec4<f32>.

@group(0) @binding(0) var<storage, read> x: array<value>;  // [tokens, heads, width]

fn input_at(i: u32) -> value {
    return x[i];
}

fn keep_input(i: u32, v: value) {
}
