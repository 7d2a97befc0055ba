// Where the keys of a span lie in the pool: from its first row on, which its records have in `pages`. Same as batch_pages.
// Exports: PAGED, pool_row(pages, c). Needs: shared/batch.

const PAGED: bool = false;

fn pool_row(pages: u32, c: u32) -> u32 {
    return (pages & ~RUN) + c;
}
