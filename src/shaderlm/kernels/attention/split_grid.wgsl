// The parameters and the grid of kernels that attend to splits: which rows, kv head and split a workgroup takes.
// Needs: served_rows, attend_split(t, kv_head, split, lane). Exports: struct Params, hidden, within(c), main.

struct Params {
    first: u32,     // row of the batch that comes first in partial and stats
    rows: u32,      // of the batch that partial and stats have room for
    splits: u32,    // of a row that they have room for
    kv_heads: u32,
    min_keys: u32,  // rows that see fewer are left alone
    skipped: u32,   // so are rows with a bit of this in their `pages`
    scale: f32,
}

// Keys of the chunk in hand that are before the window.
var<private> hidden: u32;

fn within(c: u32) -> bool {
    return WINDOW == 0u || c >= hidden;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let per_row = params.kv_heads * params.splits;
    // Splits without keys come last, so that none of them takes the place of one that has.
    let kv_head = index % params.kv_heads;
    let split = index % per_row / params.kv_heads;
    if (ONE_ROW) {
        if (index < per_row) {
            attend_split(0u, kv_head, split, lane);
        }
        return;
    }
    let rows_at_once = groups.x * groups.y / per_row;
    if (index < rows_at_once * per_row) {
        let end = min(batch_rows(), params.first + params.rows);
        var t = next_row(params.first + index / per_row, rows_at_once, end);
        while (t < end) {
            attend_split(t, kv_head, split, lane);
            t = next_row(t + rows_at_once, rows_at_once, end);
        }
    }
}
