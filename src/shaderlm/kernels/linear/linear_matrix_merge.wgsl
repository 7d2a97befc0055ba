// out[tokens, n] = epilogue(row_scale[tokens] · Σ_part parts[part, tokens, n])        the epilogue is included
// Grid: one thread per four columns of a row, folded.

const WG: u32 = 128u;

struct Params {
    tokens: u32,
    k: u32,
    n: u32,           // rows of this range of the weight
    groups: u32,
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,     // length of a row of out
    epilogue: u32,    // what becomes of the sums
    split: u32,       // parts of k
    queries: u32,     // rows of queries, for rope and the cache
    keys: u32,        // rows of keys, and as many of values
    width: u32,       // D
    rotary: u32,      // elements of a head that are rotated
}

@group(0) @binding(0) var<storage, read> parts: array<vec4<f32>>;  // [split, tokens, ceil(n / 4)]
@group(0) @binding(1) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let quads = (params.n + 3u) / 4u;
    let index = (group.x + group.y * groups.x) * WG + lane;
    if (index >= row_count() * quads) {
        return;
    }
    var sums = vec4<f32>();
    for (var part = 0u; part < params.split; part = part + 1u) {
        sums = sums + parts[part * params.tokens * quads + index];
    }
    finish(0u, index / quads, 4u * (index % quads), sums);
}
