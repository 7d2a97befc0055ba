// Where the state of a sequence lies, and which rows of a step are of one sequence. Needs: shared/batch, page_table,
// state_count(), how many rows the states have.
// Exports: state_row(row), spare_row(row), continues(t, back).

// The word before the entries of the sequence in the page table says it. Nothing leads outside.
fn state_row(row: Row) -> u32 {
    let at = (row.pages & ~RUN) - 1u;
    return min(page_table[min(at, arrayLength(&page_table) - 1u)], state_count() - 1u);
}

// Rows that verify drafts leave the state after each of them but the last, which leaves it in state_row: the first of so
// many rows of the states. The word before that of state_row; NONE: nothing else is left.
fn spare_row(row: Row) -> u32 {
    return page_table[min((row.pages & ~RUN) - 2u, arrayLength(&page_table) - 1u)];
}

// Is the row so many rows before row t that of the same sequence which is as many positions before? Both are no padding.
fn continues(t: u32, back: u32) -> bool {
    if (back > t) {
        return false;
    }
    let row = batch_row(t);
    let before = batch_row(t - back);
    return (before.pages & ~RUN) == (row.pages & ~RUN) && before.position + back == row.position;
}
