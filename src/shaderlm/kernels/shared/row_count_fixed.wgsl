// The number of rows of x, where a shape fixes it. Exports: row_count(). Same function as row_count_batch.
// Needs: params.tokens.

fn row_count() -> u32 {
    return params.tokens;
}
