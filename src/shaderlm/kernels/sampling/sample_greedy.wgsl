// tokens[slot of output r] = index of the largest of keys[r, :], whose positions in the row are indices[r, :]
// The second half of greedy sampling, after argmax_part; it ends the step.
// Grid: one workgroup per row of logits, folded.

const WG: u32 = 64u;

struct Params {
    width: u32,  // of a row of logits
    parts: u32,  // its chunks
}

@group(0) @binding(0) var<storage, read> keys: array<u32>;                // [rows, parts]
@group(0) @binding(1) var<storage, read> indices: array<u32>;             // [rows, parts]
@group(0) @binding(2) var<storage, read> outputs: array<vec4<u32>>;       // [rows, 2]
@group(0) @binding(3) var<storage, read_write> tokens: array<u32>;        // [sequence slots]
@group(0) @binding(4) var<storage, read_write> batch: array<vec4<u32>>;   // [1 + tokens]
@group(0) @binding(5) var<uniform> params: Params;

var<workgroup> outputs_there: u32;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let output = group.x + group.y * groups.x;
    if (lane == 0u) {
        outputs_there = batch[0].y;
    }
    if (output >= workgroupUniformLoad(&outputs_there)) {
        return;
    }
    let best = best_of_parts(output * params.parts, params.parts, lane);
    if (lane == 0u) {
        let place = outputs[2u * output].xy;
        tokens[place.y] = best.index;
        count_token(place.y, best.index);
        move_on(place.x, place.y);
    }
}
