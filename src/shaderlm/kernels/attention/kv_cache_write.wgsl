// k_cache[pos + s] = k[s], v_cache[pos + s] = v[s], pos = positions[0]: new rows into the cache, in the included cache format
// Grid: one thread per four values, folded.

const WG: u32 = 64u;

struct Params {
    count: u32,  // quads in k and in v
    row: u32,    // quads of one position
}

@group(0) @binding(0) var<storage, read> k: array<vec4<f32>>;                 // [S, Hkv, D / 4]
@group(0) @binding(1) var<storage, read> v: array<vec4<f32>>;                 // [S, Hkv, D / 4]
@group(0) @binding(2) var<storage, read> positions: array<u32>;               // [S]; only the first is read
@group(0) @binding(3) var<storage, read_write> k_cache: array<cache_quad>;    // [C, Hkv, D / 4]
@group(0) @binding(4) var<storage, read_write> v_cache: array<cache_quad>;    // [C, Hkv, D / 4]
@group(0) @binding(5) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    if (index < params.count) {
        let at = positions[0] * params.row + index;
        k_cache[at] = cache_pack(k[index]);
        v_cache[at] = cache_pack(v[index]);
    }
}
