// Which rows of the batch a kernel serves, where others take the rest. Needs: shared/batch, left_alone(row): whether a row is
// another kernel's. Exports: next_row(t, step, end).

fn served(t: u32, end: u32) -> bool {
    return (t < end) & !left_alone(batch_row(min(t, end - 1u)));
}

// The first of the rows t, t + step, … that is served; `end` or more if there is none. Four records are read at a time: most
// rows of a prompt are left alone, and one after the other they would each wait a full trip to memory.
fn next_row(first: u32, step: u32, end: u32) -> u32 {
    var t = first;
    while (t < end) {
        let found = vec4<bool>(
            served(t, end), served(t + step, end), served(t + 2u * step, end), served(t + 3u * step, end),
        );
        if (any(found)) {
            return t + select(select(select(3u, 2u, found.z), 1u, found.y), 0u, found.x) * step;
        }
        t = t + 4u * step;
    }
    return t;
}
