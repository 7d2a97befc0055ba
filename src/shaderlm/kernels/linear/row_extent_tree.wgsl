// Sum and maximum over the WG lanes of a workgroup, on devices without subgroups. Same function as row_extent_subgroup.
// Exports: sum_and_max(sum, largest, lane). Needs: shared/reduce_tree.

fn sum_and_max(sum: f32, largest: f32, lane: u32) -> vec2<f32> {
    return vec2<f32>(workgroup_sum(sum, lane), workgroup_max(largest, lane));
}
