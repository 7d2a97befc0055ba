// out[count, rows, columns] = rounds · a · bᵀ, a: the first TM · MATRIX_M rows of x, b: the TN · MATRIX_N rows after them
//                      the yardstick of matrix units: nothing but products of f16 with sums in f32, TM · TN chains per subgroup
// The subgroups of a workgroup share the rounds, and add up what they have in the end.
// Grid: one workgroup for each of count, folded. Needs rounds % (SUBS · STEPS) == 0, k = MATRIX_K, and subgroups of
// SUBGROUP consecutive lanes.

const SUBGROUP: u32 = 32u;
const MATRIX_M: u32 = 16u;
const MATRIX_N: u32 = 16u;
const MATRIX_K: u32 = 16u;
const TM: u32 = 2u;
const TN: u32 = 4u;
const SUBS: u32 = 8u;
const STEPS: u32 = 4u;  // rounds that are written out

const WG: u32 = SUBGROUP * SUBS;
const STRIDE: u32 = MATRIX_K / 8u;                     // vec4<u32> of a row of x, as f16
const GIVEN: u32 = (TM * MATRIX_M + TN * MATRIX_N) * STRIDE;
const RESULT: u32 = MATRIX_M * MATRIX_N / 4u;           // vec4<f32> of one matrix of sums
const TILE: u32 = max(GIVEN, SUBS * RESULT);

struct Params {
    count: u32,
    rounds: u32,  // of one subgroup, in groups of STEPS
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;          // [rows + columns, k]
@group(0) @binding(1) var<storage, read_write> out: array<vec4<f32>>;  // [count, rows, columns]
@group(0) @binding(2) var<uniform> params: Params;

var<workgroup> tile: array<vec4<u32>, TILE>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    if (index >= params.count) {
        return;
    }
    matrix_lane(lane);
    for (var i = lane; i < GIVEN; i = i + WG) {
        let low = x[2u * i];
        let high = x[2u * i + 1u];
        tile[i] = vec4<u32>(
            pack2x16float(low.xy), pack2x16float(low.zw), pack2x16float(high.xy), pack2x16float(high.zw));
    }
    workgroupBarrier();
    var left: array<Left, TM>;  // registers
    var right: array<Right, TN>;  // registers
    var sums: array<array<Result, TN>, TM>;  // registers
    for (var i = 0u; i < TM; i = i + 1u) {  // unrolled
        left[i] = load_left(i * MATRIX_M * STRIDE, STRIDE);
    }
    for (var j = 0u; j < TN; j = j + 1u) {  // unrolled
        right[j] = load_right((TM * MATRIX_M + j * MATRIX_N) * STRIDE, STRIDE);
    }
    for (var round = 0u; round < params.rounds; round = round + 1u) {
        for (var step = 0u; step < STEPS; step = step + 1u) {  // unrolled
            for (var i = 0u; i < TM; i = i + 1u) {  // unrolled
                for (var j = 0u; j < TN; j = j + 1u) {  // unrolled
                    sums[i][j] = multiply(left[i], right[j], sums[i][j]);
                }
            }
        }
    }
    for (var i = 0u; i < TM; i = i + 1u) {  // unrolled
        for (var j = 0u; j < TN; j = j + 1u) {  // unrolled
            workgroupBarrier();  // what is overwritten was read
            store_result(lane / SUBGROUP * RESULT, sums[i][j], MATRIX_N / 4u);
            workgroupBarrier();
            for (var e = lane; e < RESULT; e = e + WG) {
                var total = vec4<f32>();
                for (var s = 0u; s < SUBS; s = s + 1u) {
                    total = total + bitcast<vec4<f32>>(tile[s * RESULT + e]);
                }
                let row = (index * TM + i) * MATRIX_M + e / (MATRIX_N / 4u);
                out[(row * TN + j) * (MATRIX_N / 4u) + e % (MATRIX_N / 4u)] = total;
            }
        }
    }
}
