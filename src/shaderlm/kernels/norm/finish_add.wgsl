// What becomes of a norm: it is added. Exports: beside_at(i), finish(beside, normed). Needs: alias value, f32 or vec4<f32>.

@group(0) @binding(0) var<storage, read> residual: array<value>;  // [tokens, heads, width]

fn beside_at(i: u32) -> value {
    return residual[i];
}

fn finish(beside: value, normed: value) -> value {
    return beside + normed;
}
