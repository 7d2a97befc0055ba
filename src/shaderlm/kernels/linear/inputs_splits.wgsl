// Inputs of a product of one row: what attention/attention_key_splits leaves of SPLITS splits, joined.
// x[h, d] = Σ_split exp(m − M) · partial[split, h, d] / Σ_split exp(m − M) · l, (m, l) of [split, h], M = max m
// Every workgroup joins all inputs for itself, a quad a lane. (The lanes that round them, half as many with two quads each, took
// 0.3 µs longer on an H200.) Exports: begin_inputs(lane, size, workgroup), input_at(i), keep_input(i, value). Same functions as
// skip_none. Needs: x, WG, params.k ≤ 8 · WG.

const SPLITS: u32 = 8u;
const QUADS: u32 = 64u;  // of a head: D / 4

// With a constant for k / 4, and an array of that size, the product took 4.2 instead of 3.6 µs there.
var<workgroup> joined: array<vec4<f32>, 2u * WG>;

fn begin_inputs(lane: u32, size: u32, workgroup: u32) {
    let quads = params.k / 4u;
    for (var own = lane; own < quads; own = own + WG) {
        let first = SPLITS * quads + own / QUADS;
        var stats: array<vec4<f32>, SPLITS>;  // registers: all is asked for before anything is waited for
        var parts: array<vec4<f32>, SPLITS>;
        for (var i = 0u; i < SPLITS; i = i + 1u) {
            stats[i] = x[first + i * (quads / QUADS)];
            parts[i] = x[i * quads + own];
        }
        var largest = -3.4e38;
        for (var i = 0u; i < SPLITS; i = i + 1u) {
            largest = max(largest, stats[i].x);
        }
        var total = 0.0;
        var sum = vec4<f32>();
        for (var i = 0u; i < SPLITS; i = i + 1u) {
            let power = exp(stats[i].x - largest);  // 0 for a split without keys
            total = total + power * stats[i].y;
            sum = sum + power * parts[i];
        }
        joined[own] = sum / total;
    }
    workgroupBarrier();
}

fn input_at(i: u32) -> vec4<f32> {
    return joined[i];
}

fn keep_input(i: u32, value: vec4<f32>) {
}
