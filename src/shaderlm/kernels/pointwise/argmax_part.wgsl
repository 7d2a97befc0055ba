// Per row and chunk of CHUNK values: the largest value and its (lowest) index
// Grid: one workgroup per (row, chunk), folded. argmax_merge joins the chunks.

const WG: u32 = 256u;
const CHUNK: u32 = 2048u;

struct Params {
    rows: u32,
    width: u32,
    parts: u32,  // chunks per row
}

@group(0) @binding(0) var<storage, read> x: array<f32>;                 // [rows, width]
@group(0) @binding(1) var<storage, read_write> values: array<f32>;      // [rows, parts]
@group(0) @binding(2) var<storage, read_write> indices: array<u32>;     // [rows, parts]
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    if (index >= params.rows * params.parts) {
        return;
    }
    let row = (index / params.parts) * params.width;
    let first = (index % params.parts) * CHUNK;
    let end = min(first + CHUNK, params.width);
    // A lane without a value repeats the chunk's first: it cannot win against it.
    var value = x[row + first];
    var best = first;
    for (var i = first + lane; i < end; i = i + WG) {
        if (better(value, best, x[row + i], i)) {
            value = x[row + i];
            best = i;
        }
    }
    best_of_workgroup(value, best, lane);
    if (lane == 0u) {
        values[index] = best_value[0];
        indices[index] = best_index[0];
    }
}
