// The end of sampling where the batch stays as it is. Exports: move_on(). Same function as advance_contiguous.

fn move_on(row: u32, slot: u32) {
}
