// Blocks of the rows of the weight that a lane group computes. Exports: struct Loaded, load_rows(rows, block, blocks).
// Needs: const ROWS (1 to 4), and load_block and Packed of the format.

// A block of each row of a lane group.
struct Loaded {
    a: Packed, b: Packed, c: Packed, d: Packed,
}

// A load past the end repeats the last block and is not used.
fn load_rows(rows: vec4<u32>, block: u32, blocks: u32) -> Loaded {
    let at = min(block, blocks - 1u);
    let first = load_block(rows.x, at);
    var found = Loaded(first, first, first, first);
    if (ROWS > 1u) {
        found.b = load_block(rows.y, at);
    }
    if (ROWS > 2u) {
        found.c = load_block(rows.z, at);
    }
    if (ROWS > 3u) {
        found.d = load_block(rows.w, at);
    }
    return found;
}
