// out[t, h, d] = Σ_split exp(m − M) · partial[t, h, split, d] / Σ_split exp(m − M) · l,   (m, l) = stats[t, h, split], M = max m
// A sink is one more m with l = 1, and no values.
// QUADS lanes add up every SPLITS_AT_ONCE-th split, EARLY of them at a time, beginning with the largest m that they have
// met. How many splits there are stands in memory: the first are asked for before that is known, and left out if it
// was too early.
// Grid: one workgroup per (row, query head), folded; with a smaller one, of whole rows, each takes every so many-th row.
// Needs QUADS ≤ WG.

const WG: u32 = 256u;
const QUADS: u32 = 16u;  // D / 4
const SPLITS_AT_ONCE: u32 = WG / QUADS;
const EARLY: u32 = 4u;

struct Params {
    first: u32,     // row of the batch that comes first in partial and stats
    rows: u32,      // of the batch that partial and stats have room for
    splits: u32,    // of a row that they have room for
    heads: u32,
    min_keys: u32,  // rows that see fewer are left alone
    skipped: u32,   // so are rows with a bit of this in their `pages`
}

@group(0) @binding(0) var<storage, read> partial: array<vec4<f32>>;    // [rows, heads, splits, QUADS]
@group(0) @binding(1) var<storage, read> stats: array<vec2<f32>>;      // [rows, heads, splits]
@group(0) @binding(2) var<storage, read> batch: array<vec4<u32>>;      // [1 + tokens]
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;  // [tokens, heads, QUADS]
@group(0) @binding(4) var<uniform> params: Params;

var<workgroup> split_sums: array<vec4<f32>, WG>;
var<workgroup> split_stats: array<vec2<f32>, WG / QUADS>;  // (m, Σ l) of those that QUADS lanes add up

fn merge_row(t: u32, h: u32, lane: u32) {
    let row = batch_row(t);
    let first = ((t - params.first) * params.heads + h) * params.splits;
    let lane_split = lane / QUADS;
    let column = lane % QUADS;
    var all: array<vec2<f32>, EARLY>;  // registers
    var parts: array<vec4<f32>, EARLY>;  // registers
    for (var e = 0u; e < EARLY; e = e + 1u) {  // unrolled
        let at = first + min(lane_split + e * SPLITS_AT_ONCE, params.splits - 1u);
        all[e] = stats[at];
        parts[e] = partial[at * QUADS + column];
    }
    let splits = min(splits_of(row.position + 1u - first_chunk(row.position)), params.splits);
    var largest = -3.4e38;
    var total = 0.0;
    var sum = vec4<f32>();
    if (lane_split < SPLITS_AT_ONCE) {
        for (var i = lane_split; i < splits; i = i + EARLY * SPLITS_AT_ONCE) {
            if (i != lane_split) {
                for (var e = 0u; e < EARLY; e = e + 1u) {  // unrolled
                    let at = first + min(i + e * SPLITS_AT_ONCE, splits - 1u);
                    all[e] = stats[at];
                    parts[e] = partial[at * QUADS + column];
                }
            }
            var top = largest;
            for (var e = 0u; e < EARLY; e = e + 1u) {  // unrolled
                all[e].x = select(-3.4e38, all[e].x, i + e * SPLITS_AT_ONCE < splits);
                top = max(top, all[e].x);
            }
            let before = exp(largest - top);
            total = total * before;
            sum = sum * before;
            for (var e = 0u; e < EARLY; e = e + 1u) {  // unrolled
                if (i + e * SPLITS_AT_ONCE < splits) {  // others may be anything, NaN too
                    let now = exp(all[e].x - top);
                    total = total + all[e].y * now;
                    sum = sum + parts[e] * now;
                }
            }
            largest = top;
        }
        if (column == 0u) {
            split_stats[lane_split] = vec2<f32>(largest, total);
        }
    }
    split_sums[lane] = sum;
    workgroupBarrier();
    if (lane < QUADS) {
        let count = min(SPLITS_AT_ONCE, params.splits);  // a constant where parameters are: the loops unroll
        for (var i = 0u; i < count; i = i + 1u) {
            largest = max(largest, split_stats[i].x);
        }
        total = 0.0;
        if (SINKS) {
            largest = max(largest, sink_of(h));
            total = exp(sink_of(h) - largest);
        }
        sum = vec4<f32>();
        for (var i = 0u; i < count; i = i + 1u) {
            let weight = exp(split_stats[i].x - largest);  // 0 for lanes without splits
            total = total + weight * split_stats[i].y;
            sum = sum + weight * split_sums[i * QUADS + lane];
        }
        out[(t * params.heads + h) * QUADS + lane] = sum / total;
    }
    if (!ONE_ROW) {
        workgroupBarrier();  // split_sums and split_stats may be written again
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let head = index % params.heads;
    if (ONE_ROW) {
        if (index < params.heads) {
            merge_row(0u, head, lane);
        }
        return;
    }
    let rows_at_once = groups.x * groups.y / params.heads;
    if (index < rows_at_once * params.heads) {
        let end = min(batch_rows(), params.first + params.rows);
        var t = next_row(params.first + index / params.heads, rows_at_once, end);
        while (t < end) {
            merge_row(t, head, lane);
            t = next_row(t + rows_at_once, rows_at_once, end);
        }
    }
}
