// The number of rows of logits that a step really has; the others pad the shape. Exports: output_count(). Same function
// as output_count_fixed. Needs: params.rows.

@group(0) @binding(0) var<storage, read> batch: array<vec4<u32>>;  // [1 + tokens]: (rows, outputs, 0, 0), then the rows

fn output_count() -> u32 {
    return min(params.rows, batch[0].y);
}
