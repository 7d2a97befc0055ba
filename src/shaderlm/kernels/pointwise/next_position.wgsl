// positions[0] = positions[0] + by        a step moves the position on by itself
// Grid: one thread.

const WG: u32 = 1u;

struct Params {
    by: u32,
}

@group(0) @binding(0) var<storage, read_write> positions: array<u32>;  // [1] or more, of which the first counts
@group(0) @binding(1) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main() {
    positions[0] = positions[0] + params.by;
}
