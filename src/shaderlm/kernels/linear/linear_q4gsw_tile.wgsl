// out[tokens, n] = bias[n] + Σ_k x[tokens, k] · (nibble(n, k) − 8) · scales[k / group_size, n]
// Each thread owns a 4 × 4 tile of out in registers: a weight is unpacked once for four rows of x, an input
// serves four columns. Tiles are numbered in one dimension. Edge threads clamp their index to the last valid
// row or column and never store. Needs group_size % 8 == 0, so that a word has one scale.

const WG: u32 = 64u;

fn store(row: u32, column: u32, values: vec4<f32>) {
    if (row >= params.tokens) {
        return;
    }
    for (var j = 0u; j < 4u; j = j + 1u) {
        let n = column + j;
        if (n < params.n) {
            var value = values[j];
            if (HAS_BIAS) {
                value = value + bias[n];
            }
            out[row * params.n_total + params.n_first + n] = value;
        }
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let tiles_n = (params.n + 3u) / 4u;
    let tile = (group.x + group.y * groups.x) * WG + lane;
    let row = (tile / tiles_n) * 4u;
    let column = (tile % tiles_n) * 4u;
    if (row >= params.tokens) {
        return;
    }
    let last = params.n - 1u;
    let columns = min(vec4<u32>(column, column + 1u, column + 2u, column + 3u), vec4<u32>(last));
    let inputs = min(vec4<u32>(row, row + 1u, row + 2u, row + 3u), vec4<u32>(params.tokens - 1u)) * params.k;
    var acc0 = vec4<f32>();
    var acc1 = vec4<f32>();
    var acc2 = vec4<f32>();
    var acc3 = vec4<f32>();
    for (var w = 0u; w < params.words; w = w + 1u) {
        let words = vec4<u32>(
            weight[columns.x * params.words + w],
            weight[columns.y * params.words + w],
            weight[columns.z * params.words + w],
            weight[columns.w * params.words + w],
        );
        let scale_row = min(8u * w / params.group_size, params.groups - 1u) * params.n;
        let scale = vec4<f32>(
            scales[scale_row + columns.x],
            scales[scale_row + columns.y],
            scales[scale_row + columns.z],
            scales[scale_row + columns.w],
        );
        for (var j = 0u; j < 8u; j = j + 1u) {
            // Past the end of k the nibbles are 8, that is q = 0: any finite input will do.
            let k = min(8u * w + j, params.k - 1u);
            let q = (vec4<f32>((words >> vec4<u32>(4u * j)) & vec4<u32>(15u)) - 8.0) * scale;
            acc0 = acc0 + x[inputs.x + k] * q;
            acc1 = acc1 + x[inputs.y + k] * q;
            acc2 = acc2 + x[inputs.z + k] * q;
            acc3 = acc3 + x[inputs.w + k] * q;
        }
    }
    store(row, column, acc0);
    store(row + 1u, column, acc1);
    store(row + 2u, column, acc2);
    store(row + 3u, column, acc3);
}
