// The state of short_conv after a step: the last TAPS rows of each sequence, that of position p at p mod TAPS.
// Grid: as short_conv. What others of the sequence would write over again is not written.

const WG: u32 = 64u;
const TAPS: u32 = 4u;  // kernel
const ROWS: u32 = 8u;

struct Params {
    width: u32,
    stride: u32,  // between rows of x
    first: u32,   // column of x; of its factors, and of those of the sums, where there are some
    values_first: u32,
    after_first: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;               // [tokens, stride]
@group(0) @binding(1) var<storage, read> batch: array<vec4<u32>>;     // [1 + tokens]
@group(0) @binding(2) var<storage, read> page_table: array<u32>;
@group(0) @binding(3) var<storage, read_write> state: array<f32>;     // [states, TAPS, width]
@group(0) @binding(4) var<uniform> params: Params;

fn state_count() -> u32 {
    return arrayLength(&state) / (TAPS * params.width);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let blocks = (params.width + WG - 1u) / WG;
    let index = group.x + group.y * groups.x;
    let c = index % blocks * WG + lane;
    let first = index / blocks * ROWS;
    let rows = batch_rows();
    for (var t = first; t < min(first + ROWS, rows); t = t + 1u) {
        if (c < params.width && (t + TAPS >= rows || !continues(t + TAPS, TAPS))) {
            let row = batch_row(t);
            state[(state_row(row) * TAPS + row.position % TAPS) * params.width + c] = column_at(t, c);
        }
    }
}
