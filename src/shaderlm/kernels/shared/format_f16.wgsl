// Weight format f16: one vec4<u32> holds 8 weights. No scales. unpack2x16float is core WGSL: no f16 feature needed.
// Exports: weight4(row, quad), four weights from k = 4·quad; block_dot(row, block, x0 … x7, x_sum), the dot
// product of 32 weights from k = 32·block with x, whose sum is x_sum.

fn halves(pair: vec2<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(pair.x), unpack2x16float(pair.y));
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let word = weight[row * (params.k / 8u) + quad / 2u];
    return halves(select(word.xy, word.zw, quad % 2u == 1u));
}

fn block_dot(
    row: u32, block: u32,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>, x_sum: f32,
) -> f32 {
    let i = row * (params.k / 8u) + 4u * block;
    let a = weight[i];
    let b = weight[i + 1u];
    let c = weight[i + 2u];
    let d = weight[i + 3u];
    return dot(x0, halves(a.xy)) + dot(x1, halves(a.zw)) + dot(x2, halves(b.xy)) + dot(x3, halves(b.zw))
        + dot(x4, halves(c.xy)) + dot(x5, halves(c.zw)) + dot(x6, halves(d.xy)) + dot(x7, halves(d.zw));
}
