// order = the choices of all rows (t · used + j), expert by expert; tiles = (expert, first of order, end, 0) for at most
// TILE choices of one expert each; tiles past the last have expert NONE.
// One workgroup counts, adds up and sorts. The order within an expert is any: what is computed of a choice does not
// depend on it. Grid: one workgroup.

const WG: u32 = 256u;
const EXPERTS: u32 = 128u;  // room for as many
const TILE: u32 = 32u;
const NONE: u32 = 0xFFFFFFFFu;

struct Params {
    tokens: u32,
    experts: u32,
    used: u32,
    tiles: u32,  // room for as many
}

@group(0) @binding(0) var<storage, read> ids: array<u32>;                  // [tokens, used]
@group(0) @binding(1) var<storage, read_write> order: array<u32>;          // [tokens · used]
@group(0) @binding(2) var<storage, read_write> tiles: array<vec4<u32>>;    // [tiles]
@group(0) @binding(3) var<uniform> params: Params;

var<workgroup> counts: array<atomic<u32>, EXPERTS>;
var<workgroup> starts: array<u32, EXPERTS>;       // of an expert's choices
var<workgroup> first_tiles: array<u32, EXPERTS>;  // of an expert's tiles
var<workgroup> total: u32;

fn expert_of(choice: u32) -> u32 {
    return min(ids[choice], params.experts - 1u);
}

@compute @workgroup_size(WG)
fn main(@builtin(local_invocation_index) lane: u32) {
    let choices = row_count() * params.used;
    for (var e = lane; e < EXPERTS; e = e + WG) {
        atomicStore(&counts[e], 0u);
    }
    workgroupBarrier();
    for (var i = lane; i < choices; i = i + WG) {
        atomicAdd(&counts[expert_of(i)], 1u);
    }
    workgroupBarrier();
    if (lane == 0u) {
        var at = 0u;
        var tile = 0u;
        for (var e = 0u; e < params.experts; e = e + 1u) {
            let count = atomicLoad(&counts[e]);
            starts[e] = at;
            first_tiles[e] = tile;
            at = at + count;
            tile = tile + (count + TILE - 1u) / TILE;
        }
        total = tile;
    }
    workgroupBarrier();
    for (var e = lane; e < params.experts; e = e + WG) {
        let count = atomicLoad(&counts[e]);
        for (var i = 0u; i < (count + TILE - 1u) / TILE; i = i + 1u) {
            if (first_tiles[e] + i < params.tiles) {
                tiles[first_tiles[e] + i] = vec4<u32>(e, starts[e] + i * TILE, min(starts[e] + (i + 1u) * TILE, starts[e] + count), 0u);
            }
        }
    }
    for (var i = total + lane; i < params.tiles; i = i + WG) {
        tiles[i] = vec4<u32>(NONE, 0u, 0u, 0u);
    }
    workgroupBarrier();
    for (var e = lane; e < params.experts; e = e + WG) {
        atomicStore(&counts[e], starts[e]);
    }
    workgroupBarrier();
    for (var i = lane; i < choices; i = i + WG) {
        order[atomicAdd(&counts[expert_of(i)], 1u)] = i;
    }
}
