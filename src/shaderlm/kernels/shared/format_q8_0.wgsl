// Weight format q8_0: one vec4<u32> holds 16 signed bytes; a scale per 32 weights.
// Exports: weight4(row, quad), four weights from k = 4·quad; block_dot(row, block, x0 … x7, x_sum), the dot
// product of 32 weights from k = 32·block with x, whose sum is x_sum.

const F16_SCALES: bool = true;

fn scale_at(i: u32) -> f32 {
    if (F16_SCALES) {
        return unpack2x16float(scales[i / 2u])[i % 2u];
    }
    return bitcast<f32>(scales[i]);
}

fn weight4(row: u32, quad: u32) -> vec4<f32> {
    let word = weight[row * (params.k / 16u) + quad / 4u][quad % 4u];
    return vec4<f32>(unpack4xI8(word)) * scale_at(row * params.groups + quad / 8u);
}

fn block_dot(
    row: u32, block: u32,
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>, x_sum: f32,
) -> f32 {
    let i = row * (params.k / 16u) + 2u * block;
    let a = weight[i];
    let b = weight[i + 1u];
    let sum = dot(x0, vec4<f32>(unpack4xI8(a.x))) + dot(x1, vec4<f32>(unpack4xI8(a.y)))
        + dot(x2, vec4<f32>(unpack4xI8(a.z))) + dot(x3, vec4<f32>(unpack4xI8(a.w)))
        + dot(x4, vec4<f32>(unpack4xI8(b.x))) + dot(x5, vec4<f32>(unpack4xI8(b.y)))
        + dot(x6, vec4<f32>(unpack4xI8(b.z))) + dot(x7, vec4<f32>(unpack4xI8(b.w)));
    return sum * scale_at(row * params.groups + block);
}
