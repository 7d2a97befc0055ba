// A row of the batch becomes that of the next decode step, in a pool whose rows are positions. Exports: move_on().
// Only the workgroup of an output touches its row. Needs: batch, shared/batch.

fn move_on(row: u32, slot: u32) {
    let position = batch[1u + row].y + 1u;
    batch[1u + row] = vec4<u32>(LAST | slot, position, position, batch[1u + row].w & ~RUN);
}
