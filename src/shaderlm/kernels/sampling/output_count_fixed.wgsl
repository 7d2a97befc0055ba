// The number of rows of logits, where a shape fixes it. Exports: output_count(). Same function as output_count_batch.
// Needs: params.rows.

fn output_count() -> u32 {
    return params.rows;
}
