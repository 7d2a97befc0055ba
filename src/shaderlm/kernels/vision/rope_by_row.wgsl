// Rotates pairs of a head by the angles of its row: (u, v) → (u·cos − v·sin, u·sin + v·cos)
// half-split pairs element i with i + rotary / 2, interleaved 2i with 2i + 1; elements past `rotary` are copied.
// Grid: one thread per pair of x, folded. Needs an even D.

const WG: u32 = 64u;
const INTERLEAVED: bool = false;

struct Params {
    count: u32,   // pairs of x
    heads: u32,
    width: u32,   // D
    rotary: u32,  // how many of D are rotated
}

@group(0) @binding(0) var<storage, read> x: array<f32>;            // [tokens, heads, D]
@group(0) @binding(1) var<storage, read> table: array<vec2<f32>>;  // [tokens, rotary / 2] of (cos, sin)
@group(0) @binding(2) var<storage, read_write> out: array<f32>;    // [tokens, heads, D]
@group(0) @binding(3) var<uniform> params: Params;

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
    let pairs = params.width / 2u;
    let rotated = params.rotary / 2u;
    let i = index % pairs;
    let head = index / pairs;
    let base = head * params.width;
    if (i >= rotated) {
        out[base + 2u * i] = x[base + 2u * i];
        out[base + 2u * i + 1u] = x[base + 2u * i + 1u];
        return;
    }
    let first = base + select(i, 2u * i, INTERLEAVED);
    let second = first + select(rotated, 1u, INTERLEAVED);
    let turn = table[head / params.heads * rotated + i];
    let u = x[first];
    let v = x[second];
    out[first] = u * turn.x - v * turn.y;
    out[second] = u * turn.y + v * turn.x;
}
