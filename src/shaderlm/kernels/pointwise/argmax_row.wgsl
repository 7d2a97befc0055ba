// out[r] = index of the largest x[r, :], the lowest of equals
// Grid: one workgroup per row, folded.

const WG: u32 = 64u;

struct Params {
    rows: u32,
    width: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;            // [rows, width]
@group(0) @binding(1) var<storage, read_write> out: array<u32>;    // [rows]
@group(0) @binding(2) var<uniform> params: Params;

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
    let first = row * params.width;
    var value = x[first];
    var best = 0u;
    for (var i = lane; i < params.width; i = i + WG) {
        if (better(value, best, x[first + i], i)) {
            value = x[first + i];
            best = i;
        }
    }
    best_of_workgroup(value, best, lane);
    if (lane == 0u) {
        out[row] = best_index[0];
    }
}
