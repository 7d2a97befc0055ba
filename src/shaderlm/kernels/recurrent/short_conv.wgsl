// out[t, c] = Σ_j weight[c, j] · x[row of t's sequence, kernel − 1 − j positions before, c], and silu of it if SILU
// Rows of earlier steps are in the state, which ends with the row before the first of this step. Before a text are zeros.
// SINGLE: each row is of another sequence, and its thread writes the state too; else short_conv_state does, after this.
// Grid: one thread per value of out, folded.

const WG: u32 = 64u;
const SINGLE: bool = false;
const SILU: bool = false;

struct Params {
    width: u32,
    taps: u32,  // kernel
}

@group(0) @binding(0) var<storage, read> x: array<f32>;               // [tokens, width]
@group(0) @binding(1) var<storage, read> weight: array<f32>;          // [width, taps]
@group(0) @binding(2) var<storage, read> batch: array<vec4<u32>>;     // [1 + tokens]
@group(0) @binding(3) var<storage, read> page_table: array<u32>;
@group(0) @binding(4) var<storage, read_write> state: array<f32>;     // [states, taps − 1, width]
@group(0) @binding(5) var<storage, read_write> out: array<f32>;       // [tokens, width]
@group(0) @binding(6) var<uniform> params: Params;

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
    let c = index % width;
    if (t >= batch_rows()) {
        return;
    }
    let row = batch_row(t);
    let remembered = params.taps - 1u;
    let base = state_row(row) * remembered * width + c;
    var sum = weight[c * params.taps + remembered] * x[index];
    var in_step = 0u;  // rows before this one that the step has
    for (var back = 1u; back <= min(remembered, row.position); back = back + 1u) {
        var value = 0.0;
        if (!SINGLE && in_step + 1u == back && continues(t, back)) {
            in_step = back;
            value = x[index - back * width];
        } else {
            value = state[base + (remembered - (back - in_step)) * width];
        }
        sum = sum + weight[c * params.taps + remembered - back] * value;
    }
    if (SINGLE) {
        for (var at = 0u; at + 1u < remembered; at = at + 1u) {
            let is_text = remembered - 1u - at <= row.position;
            state[base + at * width] = select(0.0, state[base + (at + 1u) * width], is_text);
        }
        state[base + (remembered - 1u) * width] = x[index];
    }
    if (SILU) {
        sum = silu(sum);
    }
    out[index] = sum;
}
