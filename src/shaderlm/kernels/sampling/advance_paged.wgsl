// A row of the batch becomes that of the next decode step, in pages of the pool. Exports: move_on(). Same function as
// advance_contiguous. Where the sequence has no page for the next position, the row writes nothing.
// Needs: batch, shared/batch.

@group(0) @binding(0) var<storage, read> page_table: array<u32>;

fn move_on(row: u32, slot: u32) {
    let position = batch[1u + row].y + 1u;
    let pages = batch[1u + row].w & ~RUN;
    let page = page_table[min(pages + position / PAGE, arrayLength(&page_table) - 1u)];
    let place = select(page * PAGE + position % PAGE, NONE, page == NONE);
    batch[1u + row] = vec4<u32>(LAST | slot, position, place, pages);
}
