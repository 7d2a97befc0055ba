// out[tokens, n] = bias[n] + Σ_k x[tokens, k] · (nibble(n, k) − 8) · scales[k / group_size, n]
// The baseline: one workgroup per row of x, lanes stride over n, scalar loop over k. Every weight is unpacked
// m times and every input read n times. Any shape, any group size.

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if (row >= params.tokens) {
        return;
    }
    for (var n = lane; n < params.n; n = n + WG) {
        var total = 0.0;
        for (var k = 0u; k < params.k; k = k + 1u) {
            let word = weight[n * params.words + k / 8u];
            let q = f32((word >> (4u * (k % 8u))) & 15u) - 8.0;
            total = total + x[row * params.k + k] * q * scales[(k / params.group_size) * params.n + n];
        }
        if (HAS_BIAS) {
            total = total + bias[n];
        }
        out[row * params.n_total + params.n_first + n] = total;
    }
}
