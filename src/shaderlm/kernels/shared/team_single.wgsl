// Teams of one lane: nothing to add up, no barrier. For adapters that run a workgroup on few cores.
// Same function as team_tree. Needs: TEAM = 1.

fn team_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    return value;
}
