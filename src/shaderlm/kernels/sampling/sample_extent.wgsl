// Per row and chunk of CHUNK logits: the largest and the smallest key with a value. Clears the row's histogram, too
// First of four dispatches of sampling. Grid: one workgroup per (row, chunk), folded.

const WG: u32 = 256u;
const CHUNK: u32 = 2048u;
const BINS: u32 = 1024u;  // of a row's histogram

struct Params {
    rows: u32,
    width: u32,
    parts: u32,  // chunks per row
}

@group(0) @binding(0) var<storage, read> logits: array<u32>;               // [rows, width], the bits of f32
@group(0) @binding(1) var<storage, read_write> extents: array<vec2<u32>>;  // [rows, parts]: largest key, ~smallest key
@group(0) @binding(2) var<storage, read_write> histogram: array<u32>;      // [rows, 2, BINS]
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
    let part = index % params.parts;
    for (var i = part * WG + lane; i < 2u * BINS; i = i + params.parts * WG) {
        histogram[row * 2u * BINS + i] = 0u;
    }
    let first = row * params.width + part * CHUNK;
    let end = min(first + CHUNK, (row + 1u) * params.width);
    var extent = vec2<u32>();
    for (var i = lane; i < CHUNK; i = i + 4u * WG) {
        let keys = four_keys(first + i, end);
        let there = keys >= vec4<u32>(LOWEST);
        let high = select(vec4<u32>(), keys, there);
        let low = select(vec4<u32>(), ~keys, there);
        extent.x = max(extent.x, max(max(high.x, high.y), max(high.z, high.w)));
        extent.y = max(extent.y, max(max(low.x, low.y), max(low.z, low.w)));
    }
    extent = workgroup_extent(extent, lane);
    if (lane == 0u) {
        extents[index] = extent;
    }
}
