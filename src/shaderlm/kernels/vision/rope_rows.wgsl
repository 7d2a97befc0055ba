// out[t, i] = table[position of row t + its number for the axis of pair i, i], for axes 0, 1, 2 of a position
// Pairs are of the axes in turns, as long as an axis has some left, and the others of the first; grouped: one axis after
// the other.
// Grid: one thread per pair of a row, folded.

const WG: u32 = 64u;
const GROUPED: bool = false;
const IMAGE_WORDS: u32 = 8u;  // of a record of image_rows

struct Params {
    tokens: u32,
    pairs: u32,  // rotary / 2
    temporal: u32,
    vertical: u32,
    horizontal: u32,
}

@group(0) @binding(0) var<storage, read> table: array<vec2<f32>>;      // [positions, pairs] of (cos, sin)
@group(0) @binding(1) var<storage, read> batch: array<vec4<u32>>;      // [1 + tokens]
@group(0) @binding(2) var<storage, read> image_rows: array<u32>;       // [tokens, 8]
@group(0) @binding(3) var<storage, read_write> out: array<vec2<f32>>;  // [tokens, pairs]
@group(0) @binding(4) var<uniform> params: Params;

fn axis_of(i: u32) -> u32 {
    if (GROUPED) {
        return select(select(2u, 1u, i < params.temporal + params.vertical), 0u, i < params.temporal);
    }
    let turn = i % 3u;
    let left = select(params.horizontal, params.vertical, turn == 1u);
    return select(0u, turn, turn > 0u && i < 3u * left);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let t = index / params.pairs;
    if (t >= min(params.tokens, batch[0].x)) {
        return;
    }
    let i = index % params.pairs;
    let shift = bitcast<i32>(image_rows[t * IMAGE_WORDS + axis_of(i)]);
    let place = u32(max(bitcast<i32>(batch[1u + t].y) + shift, 0));
    out[index] = table[min(place, arrayLength(&table) / params.pairs - 1u) * params.pairs + i];
}
