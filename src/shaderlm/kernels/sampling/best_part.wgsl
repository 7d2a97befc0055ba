// The best of a row's chunks. Needs: keys and indices as argmax_part leaves them, best, WG.
// Call from uniform control flow; every lane gets the result.

fn best_of_parts(first: u32, parts: u32, lane: u32) -> Best {
    var best = Best(0u, 0u);
    for (var i = lane; i < parts; i = i + WG) {
        best = better(best, Best(keys[first + i], indices[first + i]));
    }
    return best_of_workgroup(best, lane);
}
