// Sum and maximum over the WG lanes of a workgroup: inside subgroups first, then over one slot per subgroup.
// Same functions as reduce_tree. Works for every subgroup size that divides WG, given that a subgroup holds
// consecutive lanes. The size comes from counting active lanes, so that kernels need no extra built-in arguments;
// the barrier before makes sure that all lanes are back from loops of different length.

var<workgroup> reduce_slots: array<f32, WG>;

fn workgroup_sum(value: f32, lane: u32) -> f32 {
    workgroupBarrier();
    let partial = subgroupAdd(value);
    let size = subgroupAdd(1u);
    if (lane % size == 0u) {
        reduce_slots[lane / size] = partial;
    }
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < WG / size; i = i + 1u) {
        total = total + reduce_slots[i];
    }
    workgroupBarrier();  // the slots may be used again
    return total;
}

fn workgroup_max(value: f32, lane: u32) -> f32 {
    workgroupBarrier();
    let partial = subgroupMax(value);
    let size = subgroupAdd(1u);
    if (lane % size == 0u) {
        reduce_slots[lane / size] = partial;
    }
    workgroupBarrier();
    var largest = reduce_slots[0];
    for (var i = 1u; i < WG / size; i = i + 1u) {
        largest = max(largest, reduce_slots[i]);
    }
    workgroupBarrier();
    return largest;
}
