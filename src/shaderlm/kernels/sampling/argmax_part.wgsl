// Per row and chunk of CHUNK logits: the largest key and the lowest index that has it
// Grid: one workgroup per (row, chunk), folded. argmax_merge and sample_greedy join the chunks.

const WG: u32 = 256u;
const CHUNK: u32 = 2048u;

struct Params {
    rows: u32,
    width: u32,
    parts: u32,  // chunks per row
}

@group(0) @binding(0) var<storage, read> logits: array<u32>;          // [rows, width], the bits of f32
@group(0) @binding(1) var<storage, read_write> keys: array<u32>;      // [rows, parts]
@group(0) @binding(2) var<storage, read_write> indices: array<u32>;   // [rows, parts]
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let row = index / params.parts;
    if (row >= output_count()) {
        return;
    }
    let first = (index % params.parts) * CHUNK;
    let base = row * params.width;
    let end = base + min(first + CHUNK, params.width);
    var best = Best(NOTHING, first);
    for (var i = lane; i < CHUNK; i = i + 4u * WG) {
        let found = best_of_four(four_keys(base + first + i, end), first + i, WG);
        best = better(best, found);
    }
    best = best_of_workgroup(best, lane);
    if (lane == 0u) {
        keys[index] = best.key;
        indices[index] = best.index;
    }
}
