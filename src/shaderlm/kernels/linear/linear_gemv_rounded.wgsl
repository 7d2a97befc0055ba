// out[0, n] = epilogue(Σ_k x[0, k] · w[n, k])        one row; x is rounded to 16 bits, with one unit per block of 32
// As linear_gemv_int16, for inputs that the product before has rounded (linear/store_rounded): lanes load the blocks that
// they multiply, and there is no barrier before the sums. A lane group computes ROWS rows of the weight (1 to 4).
// Epilogue, format of the weights (load_block) and its int16_dot are included.
// Grid: ceil(n / (ROWS · (WG / LANES_PER_ROW))) workgroups, folded. Needs: k % 32 == 0; subgroups of four lanes or more, of
// consecutive lanes.

const WG: u32 = 256u;
const LANES_PER_ROW: u32 = 32u;
const ROWS: u32 = 1u;
const ROUNDS: u32 = 1u;      // blocks of a row for each lane
const STORED: u32 = ROWS;
const SLOTS: u32 = WG / 4u;  // WG where LANES_PER_ROW is no multiple of 4

struct Params {
    tokens: u32,      // 1
    k: u32,           // multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // groups of scales per row
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,     // length of a row of out
    epilogue: u32,    // what becomes of the sums
}

@group(0) @binding(0) var<storage, read> x: array<vec4<u32>>;      // [5, k / 32]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // [n, groups] as the format has them
@group(0) @binding(3) var<storage, read> bias: array<f32>;         // [n] if there is one
@group(0) @binding(4) var<uniform> params: Params;

var<workgroup> row_slots: array<vec4<f32>, SLOTS>;  // see shared/row_sums

struct Inputs {
    first: Sixteen,
    second: Sixteen,
    unit: vec3<f32>,
}

// As load_rows: past the end, the last block.
fn load_inputs(block: u32, blocks: u32) -> Inputs {
    let at = min(block, blocks - 1u);
    let first = Sixteen(x[at], x[blocks + at]);
    let second = Sixteen(x[2u * blocks + at], x[3u * blocks + at]);
    return Inputs(first, second, bitcast<vec4<f32>>(x[4u * blocks + at]).xyz);
}

fn x_row() -> u32 {
    return 0u;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let size = subgroup_lanes();
    let workgroup = group.x + group.y * groups.x;
    let lane_group = min(lane / LANES_PER_ROW, WG / LANES_PER_ROW - 1u);
    let own = (workgroup * (WG / LANES_PER_ROW) + lane_group) * ROWS;
    let last = params.n - 1u;  // rows past the end are computed as the last one and never stored
    let rows = min(vec4<u32>(own, own + 1u, own + 2u, own + 3u), vec4<u32>(last));
    let blocks = params.k / 32u;
    var next = load_rows(rows, lane % LANES_PER_ROW, blocks);
    var next_inputs = load_inputs(lane % LANES_PER_ROW, blocks);
    let stored = (workgroup * (WG / LANES_PER_ROW) + lane_group_of_sums(lane)) * ROWS;
    begin(stored);
    var acc = vec4<f32>();
    for (var base = 0u; base < blocks; base = base + LANES_PER_ROW) {
        let block = base + lane % LANES_PER_ROW;
        let now = next;
        let inputs = next_inputs;
        if (ROUNDS > 1u) {
            next = load_rows(rows, block + LANES_PER_ROW, blocks);
            next_inputs = load_inputs(block + LANES_PER_ROW, blocks);
        }
        let there = block < blocks;
        acc.x = acc.x + select(0.0, int16_dot(now.a, inputs.first, inputs.second, inputs.unit), there);
        if (ROWS > 1u) {
            acc.y = acc.y + select(0.0, int16_dot(now.b, inputs.first, inputs.second, inputs.unit), there);
        }
        if (ROWS > 2u) {
            acc.z = acc.z + select(0.0, int16_dot(now.c, inputs.first, inputs.second, inputs.unit), there);
        }
        if (ROWS > 3u) {
            acc.w = acc.w + select(0.0, int16_dot(now.d, inputs.first, inputs.second, inputs.unit), there);
        }
    }
    if (IN_SUBGROUP) {
        acc = aligned_sums(acc, size);
    } else {
        acc = row_sums(acc, lane, size);
    }
    if (has_sums(lane, 1u)) {
        store_rows(stored, acc);
    }
}
