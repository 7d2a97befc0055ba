// How the keys of a row are cut into chunks and shared out among splits: by its length alone, whatever else is in the batch.
// Needs: params.splits. Exports: LONG_ROWS, chunk_keys(length), chunks_per_split(length), splits_of(length).

const LONG_ROWS: bool = true;  // there may be rows of more than SHORT_ROW keys
const SHORT_ROW: u32 = 2048u;

fn chunk_keys(length: u32) -> u32 {
    if (!LONG_ROWS) {
        return 64u;
    }
    return select(128u, 64u, length <= SHORT_ROW);
}

fn chunks_per_split(length: u32) -> u32 {
    if (!LONG_ROWS) {
        return 1u;
    }
    let chunks = (length + chunk_keys(length) - 1u) / chunk_keys(length);
    return (chunks + params.splits - 1u) / params.splits;
}

// Splits that have keys.
fn splits_of(length: u32) -> u32 {
    let keys = chunk_keys(length) * chunks_per_split(length);
    return (length + keys - 1u) / keys;
}
