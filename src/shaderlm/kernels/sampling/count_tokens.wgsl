// counts[sequence of row t, id of row t] + 1, for the rows of a step that have an id of their own
// What was sampled is counted by sampling. Grid: one thread per row of the batch, folded.

const WG: u32 = 64u;

struct Params {
    tokens: u32,  // rows of the batch
    width: u32,
}

@group(0) @binding(0) var<storage, read> batch: array<vec4<u32>>;           // [1 + tokens]
@group(0) @binding(1) var<storage, read> sequences: array<u32>;             // [tokens]: sequence slots, NONE: not counted
@group(0) @binding(2) var<storage, read_write> counts: array<atomic<u32>>;  // [sequence slots, width]
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = (group.x + group.y * groups.x) * WG + lane;
    if (row >= min(params.tokens, batch[0].x)) {
        return;
    }
    let id = batch[1u + row].x;
    if (id < params.width && sequences[row] != NONE) {
        atomicAdd(&counts[sequences[row] * params.width + id], 1u);
    }
}
