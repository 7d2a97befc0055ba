// Sum and maximum over the WG lanes of a workgroup at once, by subgroups, with one barrier: nothing is multiplied before a row
// is rounded. Exports: sum_and_max(sum, largest, lane), which all lanes call once.
// Right for every size of subgroups that divides WG, given that they hold consecutive lanes. Needs: shared/subgroup_lanes.

var<workgroup> extent_slots: array<vec2<f32>, WG>;

fn sum_and_max(sum: f32, largest: f32, lane: u32) -> vec2<f32> {
    let size = subgroup_lanes();
    let partial = vec2<f32>(subgroupAdd(sum), subgroupMax(largest));
    if (lane % size == 0u) {
        extent_slots[lane / size] = partial;
    }
    workgroupBarrier();
    var all = extent_slots[0];
    for (var i = 1u; i < WG / size; i = i + 1u) {
        all = vec2<f32>(all.x + extent_slots[i].x, max(all.y, extent_slots[i].y));
    }
    return all;
}
