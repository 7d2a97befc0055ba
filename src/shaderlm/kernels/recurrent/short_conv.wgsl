// out[t, c] = finished(Σ_j weight[c, j] · column[row of t's sequence, kernel − 1 − j positions before, c])
// What a column is, and what is done with the sum, is included. Rows of earlier steps are in the state, a ring: that of
// position p lies at p mod kernel. Before a text are zeros.
// SINGLE: each row is of another sequence, and its thread writes the state too; else short_conv_state does, after this.
// Where a sequence has spare rows, the states after its rows before the last are written here: they need what the state was.
// Grid: one workgroup per WG channels of ROWS rows, folded; a thread takes a channel, row by row, with the last TAPS columns
// in registers.

const WG: u32 = 64u;
const TAPS: u32 = 4u;  // kernel
const ROWS: u32 = 8u;
const SINGLE: bool = false;

struct Params {
    width: u32,
    stride: u32,  // between rows of x
    first: u32,   // column of x; of its factors, and of those of the sums, where there are some
    values_first: u32,
    after_first: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;               // [tokens, stride]
@group(0) @binding(1) var<storage, read> weight: array<f32>;          // [width, TAPS]
@group(0) @binding(2) var<storage, read> batch: array<vec4<u32>>;     // [1 + tokens]
@group(0) @binding(3) var<storage, read> page_table: array<u32>;
@group(0) @binding(4) var<storage, read_write> state: array<f32>;     // [states, TAPS, width]
@group(0) @binding(5) var<storage, read_write> out: array<f32>;       // [tokens, width]
@group(0) @binding(6) var<uniform> params: Params;

fn state_count() -> u32 {
    return arrayLength(&state) / (TAPS * params.width);
}

// The column so many positions before row t of its sequence.
fn column_before(t: u32, back: u32, c: u32) -> f32 {
    let row = batch_row(t);
    if (back > row.position) {
        return 0.0;
    }
    if (!SINGLE && continues(t, back)) {
        return column_at(t - back, c);
    }
    return state[(state_row(row) * TAPS + (row.position - back) % TAPS) * params.width + c];
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
    let end = min(first + ROWS, batch_rows());
    if (c >= params.width) {
        return;
    }
    var weights: array<f32, TAPS>;
    var columns: array<f32, TAPS>;  // of this row and of those before, the latest first
    for (var back = 0u; back < TAPS; back = back + 1u) {
        weights[back] = weight[c * TAPS + TAPS - 1u - back];
        columns[back] = 0.0;
    }
    for (var t = first; t < end; t = t + 1u) {
        let follows = !SINGLE && t > first && continues(t, 1u);
        for (var back = TAPS - 1u; back > 0u; back = back - 1u) {
            columns[back] = columns[back - 1u];
        }
        columns[0] = column_at(t, c);
        if (!follows) {
            for (var back = 1u; back < TAPS; back = back + 1u) {
                columns[back] = column_before(t, back, c);
            }
        }
        var sum = 0.0;
        for (var back = 0u; back < TAPS; back = back + 1u) {
            sum = sum + weights[back] * columns[back];
        }
        let row = batch_row(t);
        if (SINGLE) {
            state[(state_row(row) * TAPS + row.position % TAPS) * params.width + c] = columns[0];
        } else if (t + 1u < batch_rows() && continues(t + 1u, 1u)) {
            let spare = spare_row(row);
            if (spare != NONE) {
                var before = 0u;  // rows of the sequence that the step has before this one
                while (continues(t, before + 1u)) {
                    before = before + 1u;
                }
                let kept = min(spare + before, state_count() - 1u);
                for (var back = 0u; back < min(TAPS, row.position + 1u); back = back + 1u) {
                    state[(kept * TAPS + (row.position - back) % TAPS) * params.width + c] = columns[back];
                }
            }
        }
        out[t * params.width + c] = finished(t, c, sum);
    }
}
