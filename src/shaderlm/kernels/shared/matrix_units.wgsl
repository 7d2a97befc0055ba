// Products of small matrices by a subgroup, and arithmetic on pairs of f16: what the device's matrix units do.
// Operands are f16 in `tile`, two to a u32; offsets and strides count its vec4<u32>, of 8 f16 or 4 f32.
// Exports: Left [MATRIX_M, MATRIX_K], Right [MATRIX_K, MATRIX_N], Result (f32, starts as zeros); matrix_lane(lane),
// called first; load_left and load_right of rows of k; multiply(left, right, sum); store_result.
// Same functions as matrix_emulated. All lanes of a subgroup call them together.
// Needs: MATRIX_M, MATRIX_N, MATRIX_K and tile.

alias Left = subgroup_matrix_left<f16, MATRIX_K, MATRIX_M>;
alias Right = subgroup_matrix_right<f16, MATRIX_N, MATRIX_K>;
alias Result = subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>;

fn matrix_lane(lane: u32) {
}

fn load_left(at: u32, stride: u32) -> Left {
    return subgroupMatrixLoad<Left, row_major>(&tile, at, stride);
}

fn load_right(at: u32, stride: u32) -> Right {
    return subgroupMatrixLoad<Right, col_major>(&tile, at, stride);
}

fn multiply(left: Left, right: Right, sum: Result) -> Result {
    return subgroupMatrixMultiplyAccumulate(left, right, sum);
}

fn store_result(at: u32, value: Result, stride: u32) {
    subgroupMatrixStore<row_major>(&tile, at, value, stride);
}

fn half_add(a: u32, b: u32) -> u32 {
    return bitcast<u32>(bitcast<vec2<f16>>(a) + bitcast<vec2<f16>>(b));
}

fn half_multiply(a: u32, b: u32) -> u32 {
    return bitcast<u32>(bitcast<vec2<f16>>(a) * bitcast<vec2<f16>>(b));
}

fn half_fma(a: u32, b: u32, c: u32) -> u32 {
    return bitcast<u32>(fma(bitcast<vec2<f16>>(a), bitcast<vec2<f16>>(b), bitcast<vec2<f16>>(c)));
}
