// The input of a norm: a + b, which is also stored, as sum. Exports: input_at(i), keep_input(i, v). Same functions as input_x.
// Needs: alias value, f32 or vec4<f32>.

@group(0) @binding(0) var<storage, read> a: array<value>;          // [tokens, heads, width]
@group(0) @binding(1) var<storage, read> b: array<value>;          // [tokens, heads, width]
@group(0) @binding(2) var<storage, read_write> sum: array<value>;  // [tokens, heads, width]

fn input_at(i: u32) -> value {
    return a[i] + b[i];
}

fn keep_input(i: u32, v: value) {
    sum[i] = v;
}
