// The largest and the smallest key of a workgroup, as (largest, ~smallest): both are maxima. One lane joins EXTENT_GROUP
// neighbours, then every lane joins the groups. Needs: const WG, a multiple of EXTENT_GROUP.
// Call from uniform control flow; every lane gets them.

const EXTENT_GROUP: u32 = 16u;

var<workgroup> extent_slots: array<vec2<u32>, WG>;
var<workgroup> extent_groups: array<vec2<u32>, WG / EXTENT_GROUP>;

fn workgroup_extent(mine: vec2<u32>, lane: u32) -> vec2<u32> {
    extent_slots[lane] = mine;
    workgroupBarrier();
    if (lane < WG / EXTENT_GROUP) {
        var both = extent_slots[lane * EXTENT_GROUP];
        for (var i = 1u; i < EXTENT_GROUP; i = i + 1u) {
            both = max(both, extent_slots[lane * EXTENT_GROUP + i]);
        }
        extent_groups[lane] = both;
    }
    workgroupBarrier();
    var both = extent_groups[0];
    for (var i = 1u; i < WG / EXTENT_GROUP; i = i + 1u) {
        both = max(both, extent_groups[i]);
    }
    workgroupBarrier();  // the arrays may be used again
    return both;
}
