// The state of short_conv after a step: the last taps rows of each sequence, that of position p at p mod taps.
// Grid: one thread per value of a row, folded. What others of the sequence would write over again is not written.

const WG: u32 = 64u;

struct Params {
    width: u32,
    taps: u32,    // kernel
    stride: u32,  // between rows of x
    first: u32,         // column of x; of its factors, and of those of the sums, where there are some
    values_first: u32,
    after_first: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;               // [tokens, stride]
@group(0) @binding(1) var<storage, read> batch: array<vec4<u32>>;     // [1 + tokens]
@group(0) @binding(2) var<storage, read> page_table: array<u32>;
@group(0) @binding(3) var<storage, read_write> state: array<f32>;     // [states, taps, width]
@group(0) @binding(4) var<uniform> params: Params;

fn state_count() -> u32 {
    return arrayLength(&state) / (params.taps * params.width);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * WG + lane;
    let t = index / params.width;
    let c = index % params.width;
    let rows = batch_rows();
    if (t >= rows || (t + params.taps < rows && continues(t + params.taps, params.taps))) {
        return;
    }
    let row = batch_row(t);
    state[(state_row(row) * params.taps + row.position % params.taps) * params.width + c] = column_at(t, c);
}
