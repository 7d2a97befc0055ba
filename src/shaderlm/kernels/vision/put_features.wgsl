// out[t, i] = features[feature of row t, level, i] where a row has one, or x[t, i] + that; x[t, i] for other rows
// Grid: one thread per value, folded.

const WG: u32 = 64u;
const ADD: bool = false;
const IMAGE_WORDS: u32 = 8u;  // of a record of image_rows, and the place of
const FEATURE: u32 = 4u;      // 1 + the row of its features, or 0

struct Params {
    count: u32,   // tokens · width
    width: u32,
    stride: u32,  // of a row of features: all levels
    first: u32,   // of the level in it
}

@group(0) @binding(0) var<storage, read> x: array<f32>;           // [tokens, width]
@group(0) @binding(1) var<storage, read> features: array<f32>;    // [any, levels, width]
@group(0) @binding(2) var<storage, read> image_rows: array<u32>;  // [tokens, 8]
@group(0) @binding(3) var<storage, read_write> out: array<f32>;   // [tokens, width]
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    if (index >= params.count) {
        return;
    }
    let number = image_rows[index / params.width * IMAGE_WORDS + FEATURE];
    let value = x[index];
    if (number == 0u) {
        out[index] = value;
        return;
    }
    let row = min(number, arrayLength(&features) / params.stride) - 1u;
    let feature = features[row * params.stride + params.first + index % params.width];
    out[index] = select(feature, value + feature, ADD);
}
