// out[r] = index of the largest of keys[r, :], whose positions in the row are indices[r, :]
// Grid: one workgroup per row, folded.

const WG: u32 = 64u;

struct Params {
    rows: u32,
    parts: u32,
}

@group(0) @binding(0) var<storage, read> keys: array<u32>;        // [rows, parts]
@group(0) @binding(1) var<storage, read> indices: array<u32>;     // [rows, parts]
@group(0) @binding(2) var<storage, read_write> out: array<u32>;   // [rows]
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if (row >= params.rows) {
        return;
    }
    let best = best_of_parts(row * params.parts, params.parts, lane);
    if (lane == 0u) {
        out[row] = best.index;
    }
}
