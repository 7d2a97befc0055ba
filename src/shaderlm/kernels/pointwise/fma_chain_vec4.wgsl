// out[i] = f(f(… f(x[i]))), 8 · rounds times, f(v) = v · factor + term
//                      the yardstick of arithmetic speed: nothing but fused multiply-adds, sixteen chains per thread
// Grid: one thread per sixteen values, folded.

const WG: u32 = 256u;

struct Params {
    count: u32,  // quads, a multiple of 4
    rounds: u32,
    factor: f32,  // from outside, so that no compiler works the chain out
    term: f32,
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;          // [count]
@group(0) @binding(1) var<storage, read_write> out: array<vec4<f32>>;  // [count]
@group(0) @binding(2) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let threads = params.count / 4u;
    let index = (group.x + group.y * groups.x) * WG + lane;
    if (index >= threads) {
        return;
    }
    let factor = vec4<f32>(params.factor);
    let term = vec4<f32>(params.term);
    var a = x[index];
    var b = x[index + threads];
    var c = x[index + 2u * threads];
    var d = x[index + 3u * threads];
    for (var round = 0u; round < params.rounds; round++) {
        a = fma(a, factor, term); b = fma(b, factor, term); c = fma(c, factor, term); d = fma(d, factor, term);
        a = fma(a, factor, term); b = fma(b, factor, term); c = fma(c, factor, term); d = fma(d, factor, term);
        a = fma(a, factor, term); b = fma(b, factor, term); c = fma(c, factor, term); d = fma(d, factor, term);
        a = fma(a, factor, term); b = fma(b, factor, term); c = fma(c, factor, term); d = fma(d, factor, term);
        a = fma(a, factor, term); b = fma(b, factor, term); c = fma(c, factor, term); d = fma(d, factor, term);
        a = fma(a, factor, term); b = fma(b, factor, term); c = fma(c, factor, term); d = fma(d, factor, term);
        a = fma(a, factor, term); b = fma(b, factor, term); c = fma(c, factor, term); d = fma(d, factor, term);
        a = fma(a, factor, term); b = fma(b, factor, term); c = fma(c, factor, term); d = fma(d, factor, term);
    }
    out[index] = a;
    out[index + threads] = b;
    out[index + 2u * threads] = c;
    out[index + 3u * threads] = d;
}
