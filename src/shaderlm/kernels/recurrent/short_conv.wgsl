// out[t, c] = finished(Σ_j weight[c, j] · column[row of t's sequence, kernel − 1 − j positions before, c])
// What a column is, and what is done with the sum, is included. Rows of earlier steps are in the state, a ring: that of
// position p lies at p mod kernel. Before a text are zeros.
// SINGLE: each row is of another sequence, and its thread writes the state too; else short_conv_state does, after this.
// Where a sequence has spare rows, the states after its rows before the last are written here: they need what the state was.
// Grid: one thread per value of out, folded.

const WG: u32 = 64u;
const SINGLE: bool = false;

struct Params {
    width: u32,
    taps: u32,    // kernel
    stride: u32,  // between rows of x
    first: u32,         // column of x; of its factors, and of those of the sums, where there are some
    values_first: u32,
    after_first: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;               // [tokens, stride]
@group(0) @binding(1) var<storage, read> weight: array<f32>;          // [width, taps]
@group(0) @binding(2) var<storage, read> batch: array<vec4<u32>>;     // [1 + tokens]
@group(0) @binding(3) var<storage, read> page_table: array<u32>;
@group(0) @binding(4) var<storage, read_write> state: array<f32>;     // [states, taps, width]
@group(0) @binding(5) var<storage, read_write> out: array<f32>;       // [tokens, width]
@group(0) @binding(6) var<uniform> params: Params;

fn state_count() -> u32 {
    return arrayLength(&state) / (params.taps * params.width);
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
    let taps = params.taps;
    let base = state_row(row) * taps * width + c;
    let column = column_at(t, c);
    var sum = weight[c * taps + taps - 1u] * column;
    var spare = NONE;
    if (!SINGLE && t + 1u < batch_rows() && continues(t + 1u, 1u)) {
        spare = spare_row(row);
    }
    if (spare != NONE) {
        var before = 0u;  // rows of the sequence that the step has before this one
        while (continues(t, before + 1u)) {
            before = before + 1u;
        }
        spare = min(spare + before, state_count() - 1u);
        state[(spare * taps + row.position % taps) * width + c] = column;
    }
    for (var back = 1u; back < min(taps, row.position + 1u); back = back + 1u) {
        var value = 0.0;
        if (!SINGLE && continues(t, back)) {
            value = column_at(t - back, c);
        } else {
            value = state[base + (row.position - back) % taps * width];
        }
        if (spare != NONE) {
            state[(spare * taps + (row.position - back) % taps) * width + c] = value;
        }
        sum = sum + weight[c * taps + taps - 1u - back] * value;
    }
    if (SINGLE) {
        state[base + row.position % taps * width] = column;
    }
    out[index] = finished(t, c, sum);
}
