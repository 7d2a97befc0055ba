// The same as matrix_units in plain WGSL, for tests on devices that have neither matrix units nor f16. Slow.
// A lane keeps every SUBGROUP-th value of a Result. Left and Right say where they lie: products read them there, before
// the next barrier.
// Needs: MATRIX_M, MATRIX_N, MATRIX_K, SUBGROUP and tile.

const RESULT_VALUES: u32 = MATRIX_M * MATRIX_N / SUBGROUP;

struct Place {
    at: u32,
    stride: u32,
}

alias Left = Place;
alias Right = Place;
alias Result = array<f32, RESULT_VALUES>;

var<private> lane_of_subgroup: u32;

fn matrix_lane(lane: u32) {
    lane_of_subgroup = lane % SUBGROUP;
}

fn load_left(at: u32, stride: u32) -> Left {
    return Place(at, stride);
}

fn load_right(at: u32, stride: u32) -> Right {
    return Place(at, stride);
}

fn pair_at(at: u32, i: u32) -> vec2<f32> {
    return unpack2x16float(tile[at + i / 4u][i % 4u]);
}

fn multiply(left: Left, right: Right, sum: Result) -> Result {
    var found = sum;
    for (var i = 0u; i < RESULT_VALUES; i = i + 1u) {
        let e = i * SUBGROUP + lane_of_subgroup;
        for (var k = 0u; k < MATRIX_K / 2u; k = k + 1u) {
            found[i] = found[i] + dot(
                pair_at(left.at + e / MATRIX_N * left.stride, k), pair_at(right.at + e % MATRIX_N * right.stride, k));
        }
    }
    return found;
}

fn store_result(at: u32, value: Result, stride: u32) {
    var values = value;
    for (var i = 0u; i < RESULT_VALUES; i = i + 1u) {
        let e = i * SUBGROUP + lane_of_subgroup;
        tile[at + e / MATRIX_N * stride + e % MATRIX_N / 4u][e % 4u] = bitcast<u32>(values[i]);
    }
}

fn half_add(a: u32, b: u32) -> u32 {
    return pack2x16float(unpack2x16float(a) + unpack2x16float(b));
}

fn half_multiply(a: u32, b: u32) -> u32 {
    return pack2x16float(unpack2x16float(a) * unpack2x16float(b));
}

fn half_fma(a: u32, b: u32, c: u32) -> u32 {
    return pack2x16float(unpack2x16float(a) * unpack2x16float(b) + unpack2x16float(c));
}
