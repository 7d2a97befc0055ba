// Where the keys of a sequence lie in the pool: in pages. Needs: shared/batch, pool_rows(). Same as batch_contiguous.
// Exports: PAGED, pool_row(pages, c). Nothing leads outside the pool, whatever a record or the page table says.

@group(0) @binding(0) var<storage, read> page_table: array<u32>;  // page numbers, of each sequence one after the other

const PAGED: bool = true;

// The row of the pool that holds key c. The keys up to the end of its page follow it.
fn pool_row(pages: u32, c: u32) -> u32 {
    let page = page_table[min((pages & ~RUN) + c / PAGE, arrayLength(&page_table) - 1u)];
    return min(page, pool_rows() / PAGE - 1u) * PAGE + c % PAGE;
}
