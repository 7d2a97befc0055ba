// What becomes of four neighbouring sums of a choice. Exports: finish(part, m, n, sums). Same function as
// linear/finish_store. Needs: tiles_choices.

@group(0) @binding(0) var<storage, read> row_scale: array<f32>;  // [rows of x], what the sums of a row are multiplied by

fn finish(part: u32, m: u32, n: u32, sums: vec4<f32>) {
    if (m < end_of_tile) {
        store_row(m, n, sums * row_scale[input_row(m)]);
    }
}
