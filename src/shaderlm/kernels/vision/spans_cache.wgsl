// k16[t, h, :] = k[t, h, :] and v16[t, h, :] = v[t, h, :] in f16, with zeros from D on
// Grid: one thread per eight values of k16, folded.

const WG: u32 = 64u;

struct Params {
    count: u32,   // octets of k16
    width: u32,   // D
    octets: u32,  // of a head of k16
}

@group(0) @binding(0) var<storage, read> k: array<f32>;                // [tokens, heads, D]
@group(0) @binding(1) var<storage, read> v: array<f32>;                // [tokens, heads, D]
@group(0) @binding(2) var<storage, read_write> k16: array<vec4<u32>>;  // [tokens, heads, octets]
@group(0) @binding(3) var<storage, read_write> v16: array<vec4<u32>>;  // [tokens, heads, octets]
@group(0) @binding(4) var<uniform> params: Params;

fn pair(a: f32, b: f32) -> u32 {
    return pack2x16float(vec2<f32>(a, b));
}

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
    let first = index % params.octets * 8u;
    let base = index / params.octets * params.width;
    var keys: array<f32, 8>;
    var values: array<f32, 8>;
    for (var i = 0u; i < 8u; i = i + 1u) {
        let at = base + min(first + i, params.width - 1u);
        let there = first + i < params.width;
        keys[i] = select(0.0, k[at], there);
        values[i] = select(0.0, v[at], there);
    }
    k16[index] = vec4<u32>(pair(keys[0], keys[1]), pair(keys[2], keys[3]), pair(keys[4], keys[5]), pair(keys[6], keys[7]));
    v16[index] = vec4<u32>(
        pair(values[0], values[1]), pair(values[2], values[3]), pair(values[4], values[5]), pair(values[6], values[7]),
    );
}
