// Sums over the TEAM lanes of each team of a workgroup: a tree in workgroup memory. Runs on every device.
// Call from uniform control flow; the first lane of each team gets the result. Needs: const WG, TEAM, ROWS.

var<workgroup> team_slots: array<vec4<f32>, WG>;

fn team_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    team_slots[lane] = value;
    workgroupBarrier();
    for (var width = TEAM / 2u; width > 0u; width = width / 2u) {
        if (lane % TEAM < width) {
            team_slots[lane] = team_slots[lane] + team_slots[lane + width];
        }
        workgroupBarrier();
    }
    return team_slots[lane - lane % TEAM];
}
