// Segments of a tile of rows: rows of one span, which see all of it. Needs: shared/batch, attention/served_rows. Same as segments.
// Exports: left_alone(row): rows that see nothing, end_of_segment(first, end), row_last_key(row, first, t).

fn end_of_segment(first: u32, end: u32) -> u32 {
    let row = batch_row(first);
    var t = first + 1u;
    while (t < end) {
        let other = batch_row(t);
        if ((other.pages != row.pages) | (other.position != row.position)) {
            break;
        }
        t = t + 1u;
    }
    return t;
}

// The last key that row t sees, of a segment whose first row is `row`, the one with number `first`.
fn row_last_key(row: Row, first: u32, t: u32) -> u32 {
    return row.position;
}

fn left_alone(row: Row) -> bool {
    return (row.pages & RUN) == 0u;
}
