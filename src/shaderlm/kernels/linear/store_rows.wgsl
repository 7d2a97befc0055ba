// What a lane of a GEMV does with the sums of STORED rows (1 to 4; 2 or 4 if they are pairs) where the epilogue is that of the
// linears. Exports: begin(first), before the weights are multiplied, store_rows(first, sums), and finish_rows(workgroup, lane),
// which all lanes call afterwards. Needs: const STORED, x_row, the epilogue.

var<private> added: vec4<f32>;

// At the end there would be nothing to hide the wait for what is added.
fn begin(first: u32) {
    added.x = added_to(x_row(), first);
    if (STORED > 1u) {
        added.y = added_to(x_row(), first + 1u);
    }
    if (STORED > 2u) {
        added.z = added_to(x_row(), first + 2u);
    }
    if (STORED > 3u) {
        added.w = added_to(x_row(), first + 3u);
    }
}

fn store_rows(first: u32, sums: vec4<f32>) {
    if (has(GATED)) {
        store_pair(x_row(), first, sums.x, sums.y);
        if (STORED > 2u) {
            store_pair(x_row(), first + 2u, sums.z, sums.w);
        }
        return;
    }
    store_adding(x_row(), first, sums.x, added.x);
    if (STORED > 1u) {
        store_adding(x_row(), first + 1u, sums.y, added.y);
    }
    if (STORED > 2u) {
        store_adding(x_row(), first + 2u, sums.z, added.z);
    }
    if (STORED > 3u) {
        store_adding(x_row(), first + 3u, sums.w, added.w);
    }
}

fn finish_rows(workgroup: u32, lane: u32) {
}
