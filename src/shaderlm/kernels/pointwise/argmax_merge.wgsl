// out[r] = index of the largest of values[r, :], whose positions in the row are indices[r, :]
// Grid: one workgroup per row, folded.

const WG: u32 = 64u;

struct Params {
    rows: u32,
    parts: u32,
}

@group(0) @binding(0) var<storage, read> values: array<f32>;       // [rows, parts]
@group(0) @binding(1) var<storage, read> indices: array<u32>;      // [rows, parts]
@group(0) @binding(2) var<storage, read_write> out: array<u32>;    // [rows]
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
    let first = row * params.parts;
    var value = values[first];
    var best = indices[first];
    for (var i = lane; i < params.parts; i = i + WG) {
        if (better(value, best, values[first + i], indices[first + i])) {
            value = values[first + i];
            best = indices[first + i];
        }
    }
    best_of_workgroup(value, best, lane);
    if (lane == 0u) {
        out[row] = best_index[0];
    }
}
