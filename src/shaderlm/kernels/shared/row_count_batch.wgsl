// The number of rows of x that a step really has; the others pad the shape. Exports: row_count(). Same function as
// row_count_fixed. Needs: params.tokens.

@group(0) @binding(0) var<storage, read> batch: array<vec4<u32>>;  // [1 + tokens]: (rows, outputs, 0, 0), then the rows

fn row_count() -> u32 {
    return min(params.tokens, batch[0].x);
}
