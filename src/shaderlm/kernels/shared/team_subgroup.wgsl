// Sums over the TEAM lanes of each team of a workgroup: inside subgroups first, then over one slot per subgroup.
// Same function as team_tree. The subgroup size, counted from active lanes, must divide TEAM.

var<workgroup> team_slots: array<vec4<f32>, WG>;

fn team_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    var partial = vec4<f32>(subgroupAdd(value.x), 0.0, 0.0, 0.0);
    if (ROWS > 1u) {
        partial.y = subgroupAdd(value.y);
    }
    if (ROWS > 2u) {
        partial.z = subgroupAdd(value.z);
        partial.w = subgroupAdd(value.w);
    }
    let size = subgroupAdd(1u);
    if (lane % size == 0u) {
        team_slots[lane / size] = partial;
    }
    workgroupBarrier();
    let slots = TEAM / size;
    var total = vec4<f32>();
    for (var i = 0u; i < slots; i = i + 1u) {
        total = total + team_slots[(lane / TEAM) * slots + i];
    }
    return total;
}
