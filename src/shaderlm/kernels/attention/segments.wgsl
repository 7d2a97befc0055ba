// Segments of a tile of rows: rows of one sequence at consecutive positions. Needs: shared/batch, attention/served_rows.
// Exports: left_alone(row): rows of no run, end_of_segment(first, end). Same as segments_spans.

// Is row t the one that follows `row`, t − first rows further on?
fn follows(t: u32, row: Row, first: u32) -> bool {
    let other = batch_row(t);
    return (other.pages == row.pages) & (other.position == row.position + (t - first));
}

// The end of the segment that begins with row `first`. Records are read four at a time, as long as there are so many.
fn end_of_segment(first: u32, end: u32) -> u32 {
    let row = batch_row(first);
    var t = first + 1u;
    while (t + 4u <= end) {
        if (!(follows(t, row, first) & follows(t + 1u, row, first) & follows(t + 2u, row, first) & follows(t + 3u, row, first))) {
            break;
        }
        t = t + 4u;
    }
    while (t < end) {
        if (!follows(t, row, first)) {
            break;
        }
        t = t + 1u;
    }
    return t;
}

fn left_alone(row: Row) -> bool {
    return (row.pages & RUN) == 0u;
}
