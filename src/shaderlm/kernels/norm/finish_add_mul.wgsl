// What becomes of a norm: it is added, and the sum is multiplied by one number. Exports: beside_at(i), finish(beside, normed).
// Same functions as finish_add. Needs: alias value, f32 or vec4<f32>.

@group(0) @binding(0) var<storage, read> residual: array<value>;  // [tokens, heads, width]
@group(0) @binding(1) var<storage, read> scale: array<f32>;       // [1]

fn beside_at(i: u32) -> value {
    return residual[i];
}

fn finish(beside: value, normed: value) -> value {
    return (beside + normed) * scale[0];
}
