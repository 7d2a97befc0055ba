// Weight format f32: one vec4<u32> holds 4 weights. No scales.
// Exports: weight4(row, quad), four weights from k = 4·quad; block_dot(row, block, x0 … x7, x_sum), the dot
// product of 32 weights from k = 32·block with x, whose sum is x_sum.

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(weight[row * (params.k / 4u) + quad]);
}

fn block_dot(
    row: u32, block: u32,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>, x_sum: f32,
) -> f32 {
    let i = row * (params.k / 4u) + 8u * block;
    return dot(x0, bitcast<vec4<f32>>(weight[i])) + dot(x1, bitcast<vec4<f32>>(weight[i + 1u]))
        + dot(x2, bitcast<vec4<f32>>(weight[i + 2u])) + dot(x3, bitcast<vec4<f32>>(weight[i + 3u]))
        + dot(x4, bitcast<vec4<f32>>(weight[i + 4u])) + dot(x5, bitcast<vec4<f32>>(weight[i + 5u]))
        + dot(x6, bitcast<vec4<f32>>(weight[i + 6u])) + dot(x7, bitcast<vec4<f32>>(weight[i + 7u]));
}
