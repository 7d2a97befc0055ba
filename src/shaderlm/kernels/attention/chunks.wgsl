// How the keys of a row are cut into chunks and shared out among splits: by its length alone, whatever else is in the batch.
// A length counts from the first chunk of a row on. Needs: params.splits, params.min_keys, params.skipped, attention/visible.
// Exports: LONG_ROWS, chunk_keys(length), chunks_per_split(length), splits_of(length), first_chunk(last), hidden_keys(…),
// left_alone(row).

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

// The key that the first chunk begins with, of a row whose last key is given: that chunk has the first key that the row sees,
// and no chunk is in two pages.
fn first_chunk(last: u32) -> u32 {
    if (WINDOW == 0u) {
        return 0u;
    }
    let first = first_key(last);
    let begin = first - first % 64u;
    return begin - begin % chunk_keys(last + 1u - begin);
}

// How many keys of a chunk are before the first that the row sees: none but of its first chunk.
fn hidden_keys(last: u32, chunk: u32) -> u32 {
    if (WINDOW == 0u) {
        return 0u;
    }
    return max(first_key(last), chunk) - chunk;
}

fn left_alone(row: Row) -> bool {
    return (row.position + 1u < params.min_keys) | ((row.pages & params.skipped) != 0u);
}
