// The state of short_conv after a step: the last taps − 1 rows of x of each sequence. Before a text are zeros.
// Grid: one thread per value of x, folded. That of the last row of a sequence writes all values of its column.

const WG: u32 = 64u;

struct Params {
    width: u32,
    taps: u32,  // kernel
}

@group(0) @binding(0) var<storage, read> x: array<f32>;               // [tokens, width]
@group(0) @binding(1) var<storage, read> batch: array<vec4<u32>>;     // [1 + tokens]
@group(0) @binding(2) var<storage, read> page_table: array<u32>;
@group(0) @binding(3) var<storage, read_write> state: array<f32>;     // [states, taps − 1, width]
@group(0) @binding(4) var<uniform> params: Params;

fn state_count() -> u32 {
    return arrayLength(&state) / ((params.taps - 1u) * params.width);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let width = params.width;
    let index = (group.x + group.y * groups.x) * WG + lane;
    let t = index / width;
    let rows = batch_rows();
    if (t >= rows || (t + 1u < rows && continues(t + 1u, 1u))) {
        return;
    }
    let row = batch_row(t);
    let remembered = params.taps - 1u;
    let base = state_row(row) * remembered * width + index % width;
    var in_step = 0u;  // rows before this one that the step has
    while (in_step + 1u < remembered && continues(t, in_step + 1u)) {
        in_step = in_step + 1u;
    }
    for (var at = 0u; at < remembered; at = at + 1u) {  // what is read lies behind what is written
        let back = remembered - 1u - at;
        var value = 0.0;
        if (back <= in_step) {
            value = x[index - back * width];
        } else if (back <= row.position) {
            value = state[base + (at + 1u + in_step) * width];
        }
        state[base + at * width] = value;
    }
}
