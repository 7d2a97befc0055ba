// out[r] = index of the largest x[r, :], the lowest of equals; NaN counts as −inf
// Grid: one workgroup per row, folded.

const WG: u32 = 64u;

struct Params {
    rows: u32,
    width: u32,
}

@group(0) @binding(0) var<storage, read> logits: array<u32>;      // x [rows, width], the bits of f32
@group(0) @binding(1) var<storage, read_write> out: array<u32>;   // [rows]
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
    let end = first + params.width;
    var best = Best(NOTHING, 0u);
    for (var i = lane; i < params.width; i = i + 4u * WG) {
        best = better(best, best_of_four(four_keys(first + i, end), i, WG));
    }
    best = best_of_workgroup(best, lane);
    if (lane == 0u) {
        out[row] = best.index;
    }
}
