// out[0, h, d] = Σ_split exp(m − M) · partial[h, split, d] / Σ_split exp(m − M) · l,   (m, l) = stats[h, split], M = max m
// QUADS lanes make a team that adds up every TEAMS-th split, beginning with the largest m that it has met. How many splits
// there are stands in memory: the first are asked for before that is known, and left out if it was too early.
// Grid: one workgroup per query head, folded. Needs QUADS ≤ WG.

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
var<workgroup> team_stats: array<vec2<f32>, WG / QUADS>;  // (m, Σ l) of each team

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
    let team = lane / QUADS;
    let column = lane % QUADS;
    let early = first + min(team, params.splits - 1u);
    var stat = stats[early];
    var part = partial[early * QUADS + column];
    let splits = positions[0] / params.keys + 1u;
    var largest = -3.4e38;
    var total = 0.0;
    var sum = vec4<f32>();
    if (team < TEAMS) {
        for (var i = team; i < splits; i = i + TEAMS) {
            if (i != team) {
                stat = stats[first + i];
                part = partial[(first + i) * QUADS + column];
            }
            let top = max(largest, stat.x);
            let before = exp(largest - top);
            let now = exp(stat.x - top);
            total = total * before + stat.y * now;
            sum = sum * before + part * now;
            largest = top;
        }
        if (column == 0u) {
            team_stats[team] = vec2<f32>(largest, total);
        }
    }
    team_sums[lane] = sum;
    workgroupBarrier();
    if (lane < QUADS) {
        let teams = min(TEAMS, splits);
        for (var t = 0u; t < teams; t = t + 1u) {
            largest = max(largest, team_stats[t].x);
        }
        total = 0.0;
        sum = vec4<f32>();
        for (var t = 0u; t < teams; t = t + 1u) {
            let weight = exp(team_stats[t].x - largest);
            total = total + weight * team_stats[t].y;
            sum = sum + weight * team_sums[t * QUADS + lane];
        }
        out[h * QUADS + lane] = sum / total;
    }
}
