// k_cache[slot of row t] = k[t], v_cache[slot of row t] = v[t]: new rows into the pool, in the included cache format
// A slot outside the pool, which NONE is, takes nothing.
// Grid: one thread per four values of k, folded.

const WG: u32 = 64u;

struct Params {
    row: u32,  // quads of one position, Hkv · D / 4
}

@group(0) @binding(0) var<storage, read> k: array<vec4<f32>>;                 // [tokens, row]
@group(0) @binding(1) var<storage, read> v: array<vec4<f32>>;                 // [tokens, row]
@group(0) @binding(2) var<storage, read> batch: array<vec4<u32>>;             // [1 + tokens]
@group(0) @binding(3) var<storage, read_write> k_cache: array<cache_quad>;    // [pool rows, row]
@group(0) @binding(4) var<storage, read_write> v_cache: array<cache_quad>;    // [pool rows, row]
@group(0) @binding(5) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let t = index / params.row;
    if (t >= batch_rows()) {
        return;
    }
    let slot = batch_row(t).slot;
    if (slot < min(arrayLength(&k_cache), arrayLength(&v_cache)) / params.row) {
        let at = slot * params.row + index % params.row;
        k_cache[at] = cache_pack(k[index]);
        v_cache[at] = cache_pack(v[index]);
    }
}
