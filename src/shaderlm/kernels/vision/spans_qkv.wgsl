// q[t, h, :], k and v = the thirds of row t of x, with zeros from D on; q and k rotated as the included file says
// k and v are f16 with HALVES, else f32.
// Grid: one thread per eight values of a head of q, folded. Needs D a multiple of four.

const WG: u32 = 64u;
const HALVES: bool = true;

struct Params {
    count: u32,   // octets of q
    heads: u32,
    quads: u32,   // of a head of x: D / 4
    octets: u32,  // of a head of q, with its zeros
    half: u32,    // quads of half of what is rotated
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;          // [tokens, 3, heads, quads]
@group(0) @binding(1) var<storage, read_write> q: array<vec4<f32>>;    // [tokens, heads, 2 · octets]
@group(0) @binding(2) var<storage, read_write> k: array<vec4<u32>>;    // [tokens, heads, octets], of f32 twice as many
@group(0) @binding(3) var<storage, read_write> v: array<vec4<u32>>;    // as k
@group(0) @binding(4) var<uniform> params: Params;

fn halves(quads: array<vec4<f32>, 2>) -> vec4<u32> {
    let a = quads[0];
    let b = quads[1];
    return vec4<u32>(pack2x16float(a.xy), pack2x16float(a.zw), pack2x16float(b.xy), pack2x16float(b.zw));
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
    let head = index / params.octets % params.heads;
    let t = index / params.octets / params.heads;
    let third = params.heads * params.quads;
    let base = (t * 3u * params.heads + head) * params.quads;
    var queries: array<vec4<f32>, 2>;
    var keys: array<vec4<f32>, 2>;
    var values: array<vec4<f32>, 2>;
    for (var i = 0u; i < 2u; i = i + 1u) {
        let quad = index % params.octets * 2u + i;
        if (quad < params.quads) {
            queries[i] = turned_quad(base, quad, t);
            keys[i] = turned_quad(base + third, quad, t);
            values[i] = x[base + 2u * third + quad];
        }
    }
    if (HALVES) {
        k[index] = halves(keys);
        v[index] = halves(values);
    }
    for (var i = 0u; i < 2u; i = i + 1u) {
        q[2u * index + i] = queries[i];
        if (!HALVES) {
            k[2u * index + i] = bitcast<vec4<u32>>(keys[i]);
            v[2u * index + i] = bitcast<vec4<u32>>(values[i]);
        }
    }
}
