// Rows of a token batch. Needs: batch: array<vec4<u32>>, [1 + tokens]. graph/batch.py says what the words mean.
// Exports: ONE_ROW, PAGE, LAST, RUN, NONE, struct Row, batch_row(t), batch_rows().

const ONE_ROW: bool = false;    // tokens is 1: the number of rows is known
const PAGE: u32 = 128u;         // rows of the pool in a page
const LAST: u32 = 0x80000000u;  // in `id`: the token that was sampled last for a sequence slot
const RUN: u32 = 0x80000000u;   // in `pages`: the row belongs to a run
const NONE: u32 = 0xFFFFFFFFu;  // in `slot`: the row is padding, nothing is written

struct Row {
    id: u32,
    position: u32,  // it sees the keys 0 … position of its sequence
    slot: u32,      // row of the pool for its key and value
    pages: u32,     // where in the page table its sequence begins, and RUN
}

fn batch_row(t: u32) -> Row {
    let words = batch[1u + t];
    return Row(words.x, words.y, words.z, words.w);
}

// How many rows there are: what comes after them is padding.
fn batch_rows() -> u32 {
    if (ONE_ROW) {
        return 1u;
    }
    return min(batch[0].x, arrayLength(&batch) - 1u);
}
