// out[tokens, n] = bias[n] + Σ_k x[tokens, k] · (nibble(n, k) − 8) · scales[k / group_size, n]
// m = 1, the baseline of decode: 64 lanes share a row's k and load one byte (two weights) at a time; lane 0
// alone adds the partial sums. Needs an even k.

const WG: u32 = 64u;

var<workgroup> partial: array<f32, WG>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let n = group.x + group.y * groups.x;
    if (n >= params.n) {
        return;
    }
    var total = 0.0;
    for (var i = lane; i < params.k / 2u; i = i + WG) {
        let packed = (weight[n * params.words + i / 4u] >> (8u * (i % 4u))) & 255u;
        let k = 2u * i;
        let low = (f32(packed & 15u) - 8.0) * scales[(k / params.group_size) * params.n + n];
        let high = (f32(packed >> 4u) - 8.0) * scales[((k + 1u) / params.group_size) * params.n + n];
        total = total + x[k] * low + x[k + 1u] * high;
    }
    partial[lane] = total;
    workgroupBarrier();
    if (lane == 0u) {
        var value = 0.0;
        for (var i = 0u; i < WG; i = i + 1u) {
            value = value + partial[i];
        }
        if (HAS_BIAS) {
            value = value + bias[n];
        }
        out[params.n_first + n] = value;
    }
}
