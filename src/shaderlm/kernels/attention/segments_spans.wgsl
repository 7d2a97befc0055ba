// Segments of a tile of rows: rows of one span, which see all of it. Needs: shared/batch, attention/served_rows. Same as segments.
// Exports: left_alone(row): rows that see nothing, end_of_segment(first, end), row_position(row, i).

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

// The last key that the i-th row of a segment sees.
fn row_position(row: Row, i: u32) -> u32 {
    return row.position;
}

fn left_alone(row: Row) -> bool {
    return (row.pages & RUN) == 0u;
}
