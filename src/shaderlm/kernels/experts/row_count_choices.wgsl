// The number of choices that a step really has: USED for each of its rows. Exports: row_count(). Same function as
// shared/row_count_batch. Needs: params.tokens, the room for choices.

@group(0) @binding(0) var<storage, read> batch: array<vec4<u32>>;  // [1 + tokens]: (rows, outputs, 0, 0), then the rows

const USED: u32 = 1u;

fn row_count() -> u32 {
    return min(params.tokens, USED * batch[0].x);
}
