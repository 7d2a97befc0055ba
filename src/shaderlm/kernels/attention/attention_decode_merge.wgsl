// out[0, h, d] = Σ_split exp(m − M) · partial[h, split, d] / Σ_split exp(m − M) · l,   (m, l) = stats[h, split], M = max m
// QUADS lanes make a team that adds up every TEAMS-th split. Grid: one workgroup per query head, folded.
// Needs QUADS ≤ WG.

const WG: u32 = 256u;
const QUADS: u32 = 16u;  // D / 4
const TEAMS: u32 = WG / QUADS;

struct Params {
    heads: u32,
    splits: u32,  // that there is room for in partial and stats
    keys: u32,    // keys of a split
}

@group(0) @binding(0) var<storage, read> partial: array<vec4<f32>>;    // [heads, splits, QUADS]
@group(0) @binding(1) var<storage, read> stats: array<vec2<f32>>;      // [heads, splits]
@group(0) @binding(2) var<storage, read> positions: array<u32>;        // [1], where the query stands
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;  // [1, heads, QUADS]
@group(0) @binding(4) var<uniform> params: Params;

var<workgroup> team_sums: array<vec4<f32>, WG>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let h = group.x + group.y * groups.x;
    if (h >= params.heads) {
        return;
    }
    let first = h * params.splits;
    let splits = positions[0] / params.keys + 1u;
    var largest = -3.4e38;
    for (var i = lane; i < splits; i = i + WG) {
        largest = max(largest, stats[first + i].x);
    }
    largest = workgroup_max(largest, lane);
    var total = 0.0;
    for (var i = lane; i < splits; i = i + WG) {
        let s = stats[first + i];
        total = total + exp(s.x - largest) * s.y;
    }
    let factor = 1.0 / workgroup_sum(total, lane);
    let team = lane / QUADS;
    var sum = vec4<f32>();
    if (team < TEAMS) {
        for (var i = team; i < splits; i = i + TEAMS) {
            sum = sum + exp(stats[first + i].x - largest) * partial[(first + i) * QUADS + lane % QUADS];
        }
    }
    team_sums[lane] = sum;
    workgroupBarrier();
    if (lane < QUADS) {
        var value = team_sums[lane];
        for (var t = 1u; t < TEAMS; t = t + 1u) {
            value = value + team_sums[t * QUADS + lane];
        }
        out[h * QUADS + lane] = value * factor;
    }
}
