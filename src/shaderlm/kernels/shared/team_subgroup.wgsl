// Sums over the TEAM lanes of each team of a workgroup: inside subgroups first, then over one slot per subgroup.
// Same function as team_tree. Right for every subgroup size, given that a subgroup holds consecutive lanes: steps as wide as a subgroup or wider are computed
// and dropped, so that control flow stays uniform.

var<workgroup> team_slots: array<vec4<f32>, WG>;

fn team_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    workgroupBarrier();  // all lanes are back from loops of different length: the count below is the size
    let size = subgroupAdd(1u);
    var partial = value;
    for (var offset = 1u; offset < TEAM; offset = offset * 2u) {
        var other = vec4<f32>(subgroupShuffleXor(partial.x, offset), 0.0, 0.0, 0.0);
        if (ROWS > 1u) {
            other.y = subgroupShuffleXor(partial.y, offset);
        }
        if (ROWS > 2u) {
            other.z = subgroupShuffleXor(partial.z, offset);
            other.w = subgroupShuffleXor(partial.w, offset);
        }
        partial = select(partial, partial + other, offset < size);
    }
    let width = min(size, TEAM);
    if (lane % width == 0u) {
        team_slots[lane / width] = partial;
    }
    workgroupBarrier();
    let slots = TEAM / width;
    var total = vec4<f32>();
    for (var i = 0u; i < slots; i = i + 1u) {
        total = total + team_slots[(lane / TEAM) * slots + i];
    }
    return total;
}
