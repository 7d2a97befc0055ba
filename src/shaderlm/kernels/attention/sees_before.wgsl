// Which keys the rows of a segment see: up to their own. Needs: segments. Same as sees_image.
// Exports: row_last_key(row, first, t).

// The last key that row t sees, of a segment whose first row is `row`, the one with number `first`.
fn row_last_key(row: Row, first: u32, t: u32) -> u32 {
    return row.position + (t - first);
}
