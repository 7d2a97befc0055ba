// Sum and maximum over the WG lanes of a workgroup: a tree in workgroup memory. Runs on every device.
// Call from uniform control flow; every lane gets the result. Needs: const WG, a power of two.

var<workgroup> reduce_slots: array<f32, WG>;

fn workgroup_sum(value: f32, lane: u32) -> f32 {
    reduce_slots[lane] = value;
    workgroupBarrier();
    for (var width = WG / 2u; width > 0u; width = width / 2u) {
        if (lane < width) {
            reduce_slots[lane] = reduce_slots[lane] + reduce_slots[lane + width];
        }
        workgroupBarrier();
    }
    let total = reduce_slots[0];
    workgroupBarrier();  // the slots may be used again
    return total;
}

fn workgroup_max(value: f32, lane: u32) -> f32 {
    reduce_slots[lane] = value;
    workgroupBarrier();
    for (var width = WG / 2u; width > 0u; width = width / 2u) {
        if (lane < width) {
            reduce_slots[lane] = max(reduce_slots[lane], reduce_slots[lane + width]);
        }
        workgroupBarrier();
    }
    let largest = reduce_slots[0];
    workgroupBarrier();
    return largest;
}
