// k_cache[pos + s] = k[s], v_cache[pos + s] = v[s]: new rows into the cache, in the included cache format
// Grid: one thread per four values, folded.

const WG: u32 = 64u;

struct Params {
    count: u32,   // quads in k and in v
    offset: u32,  // quads before pos in the cache
}

@group(0) @binding(0) var<storage, read> k: array<vec4<f32>>;                 // [S, Hkv, D / 4]
@group(0) @binding(1) var<storage, read> v: array<vec4<f32>>;                 // [S, Hkv, D / 4]
@group(0) @binding(2) var<storage, read_write> k_cache: array<cache_quad>;    // [C, Hkv, D / 4]
@group(0) @binding(3) var<storage, read_write> v_cache: array<cache_quad>;    // [C, Hkv, D / 4]
@group(0) @binding(4) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    if (index < params.count) {
        k_cache[params.offset + index] = cache_pack(k[index]);
        v_cache[params.offset + index] = cache_pack(v[index]);
    }
}
