// Sums over the LANES_PER_ROW lanes of each lane group of a workgroup: inside subgroups first, then over one slot per
// subgroup. Same function as row_sum_tree. Needs: shared/row_sums, shared/subgroup_lanes.

var<workgroup> row_slots: array<vec4<f32>, WG>;

fn row_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    workgroupBarrier();  // all lanes are back from loops of different length: the count below is the size
    return row_sums(value, lane, subgroup_lanes());
}
