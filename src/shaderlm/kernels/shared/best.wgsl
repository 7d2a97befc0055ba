// The largest value of a workgroup and its index, in slot 0 of best_value and best_index. Needs: const WG.
// Call from uniform control flow.

var<workgroup> best_value: array<f32, WG>;
var<workgroup> best_index: array<u32, WG>;

// Larger value wins; of equal values, the lower index.
fn better(value: f32, i: u32, other: f32, j: u32) -> bool {
    return other > value || (other == value && j < i);
}

fn best_of_workgroup(value: f32, i: u32, lane: u32) {
    best_value[lane] = value;
    best_index[lane] = i;
    workgroupBarrier();
    for (var width = WG / 2u; width > 0u; width = width / 2u) {
        if (lane < width) {
            let j = lane + width;
            if (better(best_value[lane], best_index[lane], best_value[j], best_index[j])) {
                best_value[lane] = best_value[j];
                best_index[lane] = best_index[j];
            }
        }
        workgroupBarrier();
    }
}
