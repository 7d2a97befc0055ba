// The gated delta rule as in gated_delta_rule, with factors of rows that another dispatch has made. A column of S is in
// the registers of LANES neighbours of a subgroup, which add up what they have of a sum by shuffles. STAGE rows of q, k and v
// are staged in workgroup memory; no barrier lies between these rows.
// Of a stretch of rows of one sequence, a workgroup has COLUMNS values of a head; it begins with the stretches of ROWS
// rows of the step. Grid: one workgroup per (ROWS rows, value head, COLUMNS values), folded.
// Needs KEYS = 4 · QUADS · LANES, subgroups of consecutive lanes, LANES a power of two and no more than those have, and
// COLUMNS in multiples of 4, ROWS ≤ 32, STAGE ≤ WG.

const LANES: u32 = 8u;
const QUADS: u32 = 4u;  // of a column of S, of a lane
const WG: u32 = 128u;
const COLUMNS: u32 = WG / LANES;
const ROWS: u32 = 32u;
const STAGE: u32 = 16u;
const KEY_QUADS: u32 = QUADS * LANES;
const VALUE_QUADS: u32 = COLUMNS / 4u;
const GROUPED: bool = false;  // neighbouring value heads have the same key head

struct Params {
    key_heads: u32,
    value_heads: u32,
    keys: u32,    // width of a key
    values: u32,  // width of a value
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;        // [tokens, channels / 4]: q, k, v
@group(0) @binding(1) var<storage, read> row_factors: array<vec4<f32>>;  // [tokens, value_heads, 2]
@group(0) @binding(2) var<storage, read> batch: array<vec4<u32>>;    // [1 + tokens]
@group(0) @binding(3) var<storage, read> page_table: array<u32>;
@group(0) @binding(4) var<storage, read_write> state: array<f32>;    // [states, value_heads, keys, values]
@group(0) @binding(5) var<storage, read_write> out: array<f32>;      // [tokens, value_heads, values]
@group(0) @binding(6) var<uniform> params: Params;

var<workgroup> begins: atomic<u32>;  // which of the ROWS rows are the first of their sequence in the step
var<workgroup> staged: atomic<u32>;  // how many rows of the sequence are staged
var<workgroup> queries: array<vec4<f32>, STAGE * KEY_QUADS>;
var<workgroup> keys: array<vec4<f32>, STAGE * KEY_QUADS>;
var<workgroup> values: array<vec4<f32>, STAGE * VALUE_QUADS>;
var<workgroup> factors: array<vec4<f32>, STAGE * 2u>;

fn state_count() -> u32 {
    return arrayLength(&state) / (params.value_heads * params.keys * params.values);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let blocks = (params.values + COLUMNS - 1u) / COLUMNS;
    let index = group.x + group.y * groups.x;
    let head = index / blocks % params.value_heads;
    let base_row = index / blocks / params.value_heads * ROWS;
    let rows = batch_rows();
    if (base_row >= rows) {
        return;
    }
    if (lane == 0u) {
        atomicStore(&begins, 0u);
    }
    workgroupBarrier();
    if (lane < ROWS && base_row + lane < rows && !continues(base_row + lane, 1u)) {
        atomicOr(&begins, 1u << lane);
    }
    var remaining = workgroupUniformLoad(&begins);  // a barrier
    while (remaining != 0u) {
        let first = base_row + firstTrailingBit(remaining);
        remaining = remaining & (remaining - 1u);
        run(first, rows, head, index % blocks * COLUMNS, lane);
    }
}

// The rows of one sequence from row `first` on, of the columns from `first_column` on.
fn run(first: u32, rows: u32, head: u32, first_column: u32, lane: u32) {
    let part = lane % LANES;
    let there = first_column + lane / LANES < params.values;
    let column = min(first_column + lane / LANES, params.values - 1u);
    let key_head = select(head % params.key_heads, head / (params.value_heads / params.key_heads), GROUPED);
    let key_quads = params.key_heads * KEY_QUADS;
    let value_quads = params.value_heads * params.values / 4u;
    let begin = batch_row(first);
    let spare = spare_row(begin);
    let base = (state_row(begin) * params.value_heads + head) * params.keys * params.values + column;
    let v_at = 2u * key_quads + (head * params.values + first_column) / 4u;
    let v_last = params.values / 4u - 1u - first_column / 4u;

    var S: array<vec4<f32>, QUADS>;  // registers
    for (var j = 0u; j < QUADS; j = j + 1u) {  // unrolled
        S[j] = vec4<f32>();
        if (begin.position > 0u) {
            let at = base + 4u * (part + j * LANES) * params.values;
            S[j] = vec4<f32>(state[at], state[at + params.values], state[at + 2u * params.values], state[at + 3u * params.values]);
        }
    }
    var t = first;
    var more = true;
    while (more) {
        workgroupBarrier();  // the rows before have been read
        if (lane == 0u) {
            atomicStore(&staged, min(STAGE, rows - t));
        }
        workgroupBarrier();
        if (lane < STAGE && t + lane < rows && t + lane > first && !continues(t + lane, 1u)) {
            atomicMin(&staged, lane);
        }
        for (var i = lane; i < STAGE * KEY_QUADS; i = i + WG) {
            let at = min(t + i / KEY_QUADS, rows - 1u) * (2u * key_quads + value_quads) + key_head * KEY_QUADS + i % KEY_QUADS;
            queries[i] = x[at];
            keys[i] = x[at + key_quads];
        }
        for (var i = lane; i < STAGE * VALUE_QUADS; i = i + WG) {
            let row = min(t + i / VALUE_QUADS, rows - 1u);
            values[i] = x[row * (2u * key_quads + value_quads) + v_at + min(i % VALUE_QUADS, v_last)];
        }
        for (var i = lane; i < STAGE * 2u; i = i + WG) {
            factors[i] = row_factors[2u * (min(t + i / 2u, rows - 1u) * params.value_heads + head) + i % 2u];
        }
        let count = workgroupUniformLoad(&staged);  // a barrier
        for (var i = 0u; i < count; i = i + 1u) {
            let f = factors[2u * i];
            let value = values[i * VALUE_QUADS + lane / LANES / 4u][lane / LANES % 4u];
            var k: array<vec4<f32>, QUADS>;  // registers
            var by_k = vec4<f32>();
            var by_q = vec4<f32>();
            for (var j = 0u; j < QUADS; j = j + 1u) {  // unrolled
                k[j] = keys[i * KEY_QUADS + part + j * LANES];
                by_k = by_k + S[j] * k[j];
                by_q = by_q + S[j] * queries[i * KEY_QUADS + part + j * LANES];
            }
            var sums = vec2<f32>(by_k.x + by_k.y + (by_k.z + by_k.w), by_q.x + by_q.y + (by_q.z + by_q.w));
            for (var offset = 1u; offset < LANES; offset = offset * 2u) {
                sums = sums + vec2<f32>(subgroupShuffleXor(sums.x, offset), subgroupShuffleXor(sums.y, offset));
            }
            let change = (value - f.y * sums.x) * f.z;
            for (var j = 0u; j < QUADS; j = j + 1u) {  // unrolled
                S[j] = f.x * S[j] + k[j] * change;
            }
            if (there && part == 0u) {
                let at = ((t + i) * params.value_heads + head) * params.values + column;
                out[at] = f.w * sums.y + factors[2u * i + 1u].x * change;
            }
            if (spare != NONE && there && t + i + 1u < rows && continues(t + i + 1u, 1u)) {
                let kept = min(spare + t + i - first, state_count() - 1u);
                let place = (kept * params.value_heads + head) * params.keys * params.values + column;
                for (var j = 0u; j < QUADS; j = j + 1u) {  // unrolled
                    let at = place + 4u * (part + j * LANES) * params.values;
                    state[at] = S[j].x;
                    state[at + params.values] = S[j].y;
                    state[at + 2u * params.values] = S[j].z;
                    state[at + 3u * params.values] = S[j].w;
                }
            }
        }
        t = t + count;
        more = count == STAGE && t < rows && continues(t, 1u);
    }
    if (there) {
        for (var j = 0u; j < QUADS; j = j + 1u) {  // unrolled
            let at = base + 4u * (part + j * LANES) * params.values;
            state[at] = S[j].x;
            state[at + params.values] = S[j].y;
            state[at + 2u * params.values] = S[j].z;
            state[at + 3u * params.values] = S[j].w;
        }
    }
}
