// Sums over the TEAM lanes of each team of a workgroup: inside subgroups first, then over one slot per subgroup.
// Same function as team_tree. Needs: shared/team_sums, shared/subgroup_lanes.

var<workgroup> team_slots: array<vec4<f32>, WG>;

fn team_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    workgroupBarrier();  // all lanes are back from loops of different length: the count below is the size
    return team_sums(value, lane, subgroup_lanes());
}
