// What is added to a norm. Exports: added_at(i). Needs: alias value, f32 or vec4<f32>.

@group(0) @binding(0) var<storage, read> residual: array<value>;  // [tokens, heads, width]

fn added_at(i: u32) -> value {
    return residual[i];
}
