// What scores, softmax and values share: parameters, and where the queries of a dispatch are in their sequence.
// Needs: shared/batch. The rows of the batch are consecutive rows of one sequence. Exports: struct Params, first_position().

struct Params {
    rows: u32,      // queries of this dispatch
    first: u32,     // the first of them in q and out
    stride: u32,    // length of a row of scores: a multiple of 4, no less than the keys that any query may see
    heads: u32,     // query heads
    kv_heads: u32,
    quads: u32,     // D / 4
    scale: f32,
}

// Of the first query of this dispatch.
fn first_position() -> u32 {
    return batch_row(0u).position + params.first;
}
