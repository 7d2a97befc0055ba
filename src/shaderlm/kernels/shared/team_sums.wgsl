// Sums over the TEAM lanes of each team of a workgroup, given the size of subgroups: inside them first, then over one slot
// per subgroup. Right for every size, given that a subgroup holds consecutive lanes: steps as wide as a subgroup or wider
// are computed and dropped, so that control flow stays uniform. All lanes are here; the first of each team gets the result.
// Teams whose size is no power of two lie across subgroups: as many of their lanes as are sure to be in one have a slot.
// Needs: const WG, TEAM, ROWS; workgroup array team_slots: an element for each subgroup, or for each team if that is smaller, if
// TEAM is a power of two; for each four lanes if it is a multiple of 4; else for each lane.

// Lanes of a team that are sure to be in one subgroup, if that has so many: the largest power of two that divides TEAM, from four
// on. Of two, nothing is gained: gate and up of gemma-3-1b, teams of 18, took 7.6 instead of 7.5 µs on an H200.
const ALIGNED: u32 = select(1u, TEAM & ~(TEAM - 1u), TEAM % 4u == 0u || TEAM < 4u);

fn team_sums(value: vec4<f32>, lane: u32, size: u32) -> vec4<f32> {
    var partial = value;
    for (var offset = 1u; offset < ALIGNED; offset = offset * 2u) {
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
    let width = min(size, ALIGNED);
    if (lane % width == 0u) {
        team_slots[lane / width] = partial;
    }
    workgroupBarrier();
    var total = vec4<f32>();
    if (lane % TEAM == 0u && lane < WG / TEAM * TEAM) {
        for (var i = 0u; i < TEAM / width; i = i + 1u) {
            total = total + team_slots[lane / width + i];
        }
    }
    return total;
}
