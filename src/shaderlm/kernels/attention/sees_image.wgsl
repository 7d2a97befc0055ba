// Which keys the rows of a segment see: those of an image all of it, others up to their own. Rows of an image are of a run,
// however few they are. Needs: segments. Same as sees_before.
// Exports: row_last_key(row, first, t).

const IMAGE_WORDS: u32 = 8u;  // of a record of image_rows, and the place of
const REACH: u32 = 3u;        // keys after its own that a row sees

@group(0) @binding(0) var<storage, read> image_rows: array<u32>;  // [tokens, 8]

// The last key that row t sees, of a segment whose first row is `row`, the one with number `first`. Of the next row it is
// the same or a later one.
fn row_last_key(row: Row, first: u32, t: u32) -> u32 {
    return row.position + (t - first) + image_rows[min(t, batch_rows() - 1u) * IMAGE_WORDS + REACH];
}
