// out[tokens, n] = bias[n] + Σ_k x[tokens, k] · (nibble(n, k) − 8) · scales[k / group_size, n]
// m = 1: 64 lanes share a row's k, each loads whole words (8 weights). Grid-stride over n, so the number of
// workgroups is a choice. Needs k % 8 == 0 and group_size % 8 == 0, so that a word has one scale.

const WG: u32 = 64u;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    for (var n = group.x + group.y * groups.x; n < params.n; n = n + groups.x * groups.y) {
        var total = 0.0;
        for (var w = lane; w < params.words; w = w + WG) {
            let word = weight[n * params.words + w];
            let k = 8u * w;
            let low = vec4<f32>((vec4<u32>(word) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u)) - 8.0;
            let high = vec4<f32>((vec4<u32>(word) >> vec4<u32>(16u, 20u, 24u, 28u)) & vec4<u32>(15u)) - 8.0;
            let sum = dot(vec4<f32>(x[k], x[k + 1u], x[k + 2u], x[k + 3u]), low)
                + dot(vec4<f32>(x[k + 4u], x[k + 5u], x[k + 6u], x[k + 7u]), high);
            total = total + sum * scales[(k / params.group_size) * params.n + n];
        }
        total = workgroup_sum(total, lane);
        if (lane == 0u) {
            if (HAS_BIAS) {
                total = total + bias[n];
            }
            out[params.n_first + n] = total;
        }
    }
}
