// Sums over the TEAM lanes of each team of a workgroup, given the size of subgroups: inside them first, then over one slot
// per subgroup. Right for every size, given that a subgroup holds consecutive lanes: steps as wide as a subgroup or wider
// are computed and dropped, so that control flow stays uniform. All lanes are here; the first of each team gets the result.
// Teams whose size is no power of two lie across subgroups: their first lane adds what all of them leave in slots.
// Needs: const WG, TEAM, ROWS; workgroup array team_slots, an element for each subgroup, or for each team if that is smaller; for
// each lane if TEAM is no power of two.

fn team_sums(value: vec4<f32>, lane: u32, size: u32) -> vec4<f32> {
    if ((TEAM & (TEAM - 1u)) != 0u) {
        team_slots[lane] = value;
        workgroupBarrier();
        var sum = vec4<f32>();
        if (lane % TEAM == 0u) {
            for (var i = 0u; i < TEAM; i = i + 1u) {
                sum = sum + team_slots[min(lane + i, WG - 1u)];
            }
        }
        return sum;
    }
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
    var total = vec4<f32>();
    for (var i = 0u; i < TEAM / width; i = i + 1u) {
        total = total + team_slots[lane / TEAM * (TEAM / width) + i];
    }
    return total;
}
