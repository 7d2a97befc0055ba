// The gated delta rule as in gated_delta_rule, with factors of rows that another dispatch has made. A column of S is in
// the registers of LANES neighbours of a subgroup, which add up what they have of a sum by shuffles: no barrier, and the
// next row is on its way meanwhile.
// Of a stretch of rows of one sequence, a workgroup has COLUMNS values of a head; it begins with the stretches of ROWS
// rows of the step. Grid: one workgroup per (ROWS rows, value head, COLUMNS values), folded.
// Needs KEYS = 4 · QUADS · LANES, subgroups of consecutive lanes, LANES a power of two and no more than those have.

const LANES: u32 = 8u;
const QUADS: u32 = 4u;  // of a column of S, of a lane
const WG: u32 = 128u;
const COLUMNS: u32 = WG / LANES;
const ROWS: u32 = 32u;
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
        run(first, rows, head, index % blocks * COLUMNS + lane / LANES, lane % LANES);
    }
}

// The rows of one sequence from row `first` on, of one column.
fn run(first: u32, rows: u32, head: u32, wanted_column: u32, part: u32) {
    let there = wanted_column < params.values;
    let column = min(wanted_column, params.values - 1u);
    let key_head = select(head % params.key_heads, head / (params.value_heads / params.key_heads), GROUPED);
    let key_quads = params.key_heads * params.keys / 4u;
    let channel_quads = 2u * key_quads + params.value_heads * params.values / 4u;
    let begin = batch_row(first);
    let base = (state_row(begin) * params.value_heads + head) * params.keys * params.values + column;
    let q_at = key_head * params.keys / 4u + part;
    let value_at = head * params.values + column;
    let v_at = 2u * key_quads + value_at / 4u;

    let spare = spare_row(begin);
    var S: array<vec4<f32>, QUADS>;  // registers
    var k: array<vec4<f32>, QUADS>;  // registers
    var q: array<vec4<f32>, QUADS>;  // registers
    for (var j = 0u; j < QUADS; j = j + 1u) {  // unrolled
        q[j] = x[first * channel_quads + q_at + j * LANES];
        k[j] = x[first * channel_quads + key_quads + q_at + j * LANES];
        S[j] = vec4<f32>();
        if (begin.position > 0u) {
            let at = base + 4u * (part + j * LANES) * params.values;
            S[j] = vec4<f32>(state[at], state[at + params.values], state[at + 2u * params.values], state[at + 3u * params.values]);
        }
    }
    var value = x[first * channel_quads + v_at][value_at % 4u];
    var factors = row_factors[2u * (first * params.value_heads + head)];
    var product = row_factors[2u * (first * params.value_heads + head) + 1u].x;
    var more = first + 1u < rows && continues(first + 1u, 1u);  // is there a row after this one?
    for (var t = first; ; t = t + 1u) {
        var sums = vec2<f32>();
        for (var j = 0u; j < QUADS; j = j + 1u) {  // unrolled
            sums = sums + vec2<f32>(dot(S[j], k[j]), dot(S[j], q[j]));
        }
        let next = select(t, t + 1u, more);
        let goes_on = more && t + 2u < rows && continues(t + 2u, 1u);
        let row = next * channel_quads;
        var next_k: array<vec4<f32>, QUADS>;  // registers
        for (var j = 0u; j < QUADS; j = j + 1u) {  // unrolled
            q[j] = x[row + q_at + j * LANES];
            next_k[j] = x[row + key_quads + q_at + j * LANES];
        }
        let next_value = x[row + v_at][value_at % 4u];
        let next_factors = row_factors[2u * (next * params.value_heads + head)];
        let next_product = row_factors[2u * (next * params.value_heads + head) + 1u].x;
        for (var offset = 1u; offset < LANES; offset = offset * 2u) {
            sums = sums + vec2<f32>(subgroupShuffleXor(sums.x, offset), subgroupShuffleXor(sums.y, offset));
        }
        let change = (value - factors.y * sums.x) * factors.z;
        for (var j = 0u; j < QUADS; j = j + 1u) {  // unrolled
            S[j] = factors.x * S[j] + k[j] * change;
            k[j] = next_k[j];
        }
        if (there && part == 0u) {
            out[t * params.value_heads * params.values + value_at] = factors.w * sums.y + product * change;
        }
        if (more && spare != NONE && there) {
            let kept = min(spare + t - first, state_count() - 1u);
            let place = (kept * params.value_heads + head) * params.keys * params.values + column;
            for (var j = 0u; j < QUADS; j = j + 1u) {  // unrolled
                let at = place + 4u * (part + j * LANES) * params.values;
                state[at] = S[j].x;
                state[at + params.values] = S[j].y;
                state[at + 2u * params.values] = S[j].z;
                state[at + 3u * params.values] = S[j].w;
            }
        }
        value = next_value;
        factors = next_factors;
        product = next_product;
        if (!more) {
            break;
        }
        more = goes_on;
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
