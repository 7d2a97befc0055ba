// Sums and running sums over the lanes of a workgroup, in an order that does not change. One lane joins GROUP neighbours,
// then every lane joins the groups: three barriers, where a tree of 256 lanes takes nine. Works without subgroups.
// Needs: const WG, a multiple of GROUP. Call from uniform control flow.

const GROUP: u32 = 16u;

var<workgroup> running: array<vec4<f32>, WG>;  // after scan: sums up to and with a lane
var<workgroup> groups: array<vec4<f32>, WG / GROUP>;

fn join_groups(mine: vec4<f32>, lane: u32) {
    running[lane] = mine;
    workgroupBarrier();
    if (lane < WG / GROUP) {
        var sum = running[lane * GROUP];
        for (var i = 1u; i < GROUP; i = i + 1u) {
            sum = sum + running[lane * GROUP + i];
        }
        groups[lane] = sum;
    }
    workgroupBarrier();
}

// The sum over all lanes; every lane gets it.
fn workgroup_sum(mine: vec4<f32>, lane: u32) -> vec4<f32> {
    join_groups(mine, lane);
    var sum = groups[0];
    for (var i = 1u; i < WG / GROUP; i = i + 1u) {
        sum = sum + groups[i];
    }
    workgroupBarrier();  // both arrays may be used again
    return sum;
}

// Leaves the sums up to and with each lane in `running`. They may be read until the next barrier.
fn scan(mine: vec4<f32>, lane: u32) {
    join_groups(mine, lane);
    var sum = vec4<f32>();
    for (var i = 0u; i < lane / GROUP; i = i + 1u) {
        sum = sum + groups[i];
    }
    for (var i = lane - lane % GROUP; i < lane; i = i + 1u) {
        sum = sum + running[i];
    }
    workgroupBarrier();
    running[lane] = sum + mine;
    workgroupBarrier();
}

// The sum of the lanes before this one, after scan.
fn sum_before(lane: u32) -> vec4<f32> {
    return select(running[max(lane, 1u) - 1u], vec4<f32>(), lane == 0u);
}
