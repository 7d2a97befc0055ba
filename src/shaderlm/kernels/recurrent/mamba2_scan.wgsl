// Row by row of a sequence, for each head with the B and C of its group:
// S ← exp(rate · dt) S + dt · B vᵀ, out = Sᵀ C + skip · v, dt = log(1 + exp(delta + shift)) within its limits
// v, B and C are silu(x + bias): x is the values of all heads, B of all groups, C of all groups.
// GATED: out is that times silu of gates, which lie in rows beside the steps.
// Grid: for each WINDOW of rows, head and 4 · QUADS of its values one workgroup, folded: it takes the sequences that begin
// in its window, one after the other, to their ends. Four columns of S are in the registers of PARTS lanes, 4 · ROW_QUADS
// rows each. Sums over rows are taken once for CHUNK rows of the step, and in the same order whatever CHUNK is.
// Needs STATE in multiples of 4 · ROW_QUADS, and values in fours.

const QUADS: u32 = 8u;
const PARTS: u32 = 16u;   // STATE / (4 · ROW_QUADS)
const WG: u32 = 128u;     // QUADS · PARTS
const STATE: u32 = 128u;  // rows of S
const ROW_QUADS: u32 = 2u;
const WINDOW: u32 = 8u;   // rows of the step that a workgroup looks at
const CHUNK: u32 = 8u;    // rows of the step between two barriers
const SUMS: u32 = 1024u;  // CHUNK · WG
const STAGED: u32 = 256u; // CHUNK · STATE / 4
const VALUES: u32 = 64u;  // CHUNK · QUADS
const GATED: bool = false;
const SINGLE: bool = false;  // each row is of another sequence

struct Params {
    heads: u32,
    groups: u32,
    values: u32,  // of a head
    least: f32,   // limits of dt
    most: f32,
    stride: u32,  // between rows of projected, and where the steps and the gates of its rows begin
    deltas_first: u32,
    gate_first: u32,
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;        // [tokens, heads · values + 2 · groups · STATE]
@group(0) @binding(1) var<storage, read> bias: array<vec4<f32>>;     // [heads · values + 2 · groups · STATE]
@group(0) @binding(2) var<storage, read> projected: array<f32>;      // [tokens, stride]
@group(0) @binding(3) var<storage, read> factors: array<f32>;        // [3, heads]: rate, shift, skip
@group(0) @binding(4) var<storage, read> batch: array<vec4<u32>>;    // [1 + tokens]
@group(0) @binding(5) var<storage, read> page_table: array<u32>;
@group(0) @binding(6) var<storage, read_write> state: array<vec4<f32>>;  // [states, heads, STATE, values]
@group(0) @binding(7) var<storage, read_write> out: array<vec4<f32>>;    // [tokens, heads, values]
@group(0) @binding(8) var<uniform> params: Params;

var<workgroup> Bs: array<vec4<f32>, STAGED>;
var<workgroup> Cs: array<vec4<f32>, STAGED>;
var<workgroup> vs: array<vec4<f32>, VALUES>;
var<workgroup> steps: array<vec2<f32>, CHUNK>;  // dt, exp(rate · dt)
var<workgroup> sums: array<vec4<f32>, SUMS>;

fn state_count() -> u32 {
    return arrayLength(&state) / (params.heads * STATE * params.values / 4u);
}

fn softplus(v: f32) -> f32 {
    return select(log(1.0 + exp(min(v, 20.0))), v, v > 20.0);
}

fn silu4(v: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(silu(v.x), silu(v.y), silu(v.z), silu(v.w));
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let blocks = (params.values / 4u + QUADS - 1u) / QUADS;
    let index = group.x + group.y * groups.x;
    let window = index / blocks / params.heads * WINDOW;
    let rows = batch_rows();
    for (var first = window; first < min(window + WINDOW, rows); first = first + 1u) {
        if (SINGLE || !continues(first, 1u)) {
            run(first, rows, index / blocks % params.heads, index % blocks * QUADS, lane);
        }
    }
}

// A head's columns from the quad `begin_quad` on, of the sequence that begins at row `first`.
fn run(first: u32, rows: u32, head: u32, begin_quad: u32, lane: u32) {
    let quads = params.values / 4u;
    let quad = begin_quad + lane % QUADS;
    let there = quad < quads;
    let part = lane / QUADS;
    let B_at = params.heads * quads + head / (params.heads / params.groups) * (STATE / 4u);
    let C_at = B_at + params.groups * (STATE / 4u);
    let channels = params.heads * quads + params.groups * (STATE / 2u);
    let rate = factors[head];
    let shift = factors[params.heads + head];
    let skip = factors[2u * params.heads + head];
    let begin = batch_row(first);
    let spare = spare_row(begin);
    let place = head * STATE + part * 4u * ROW_QUADS;
    let base = (state_row(begin) * params.heads * STATE + place) * quads + quad;

    var S: array<array<vec4<f32>, 4>, ROW_QUADS>;  // registers
    for (var q = 0u; q < ROW_QUADS; q = q + 1u) {  // unrolled
        S[q][0u] = vec4<f32>();
        S[q][1u] = vec4<f32>();
        S[q][2u] = vec4<f32>();
        S[q][3u] = vec4<f32>();
        if (there && begin.position > 0u) {
            S[q][0u] = state[base + 4u * q * quads];
            S[q][1u] = state[base + (4u * q + 1u) * quads];
            S[q][2u] = state[base + (4u * q + 2u) * quads];
            S[q][3u] = state[base + (4u * q + 3u) * quads];
        }
    }
    var t = first;
    loop {
        var count = 1u;
        while (!SINGLE && count < CHUNK && t + count < rows && continues(t + count, 1u)) {
            count = count + 1u;
        }
        for (var i = lane; i < count * (STATE / 4u); i = i + WG) {
            let row = (t + i / (STATE / 4u)) * channels;
            let n = i % (STATE / 4u);
            Bs[i] = silu4(x[row + B_at + n] + bias[B_at + n]);
            Cs[i] = silu4(x[row + C_at + n] + bias[C_at + n]);
        }
        for (var i = lane; i < count * QUADS; i = i + WG) {
            let at = head * quads + min(begin_quad + i % QUADS, quads - 1u);
            vs[i] = silu4(x[(t + i / QUADS) * channels + at] + bias[at]);
        }
        for (var i = lane; i < count; i = i + WG) {
            let delta = projected[(t + i) * params.stride + params.deltas_first + head];
            let dt = clamp(softplus(delta + shift), params.least, params.most);
            steps[i] = vec2<f32>(dt, exp(rate * dt));
        }
        workgroupBarrier();
        for (var i = 0u; i < count; i = i + 1u) {
            if (!SINGLE && t + i > first && spare != NONE && there) {
                let row = min(spare + t + i - first - 1u, state_count() - 1u);
                let kept = (row * params.heads * STATE + place) * quads + quad;
                for (var q = 0u; q < ROW_QUADS; q = q + 1u) {  // unrolled
                    state[kept + 4u * q * quads] = S[q][0u];
                    state[kept + (4u * q + 1u) * quads] = S[q][1u];
                    state[kept + (4u * q + 2u) * quads] = S[q][2u];
                    state[kept + (4u * q + 3u) * quads] = S[q][3u];
                }
            }
            let now = steps[i];
            let v = now.x * vs[i * QUADS + lane % QUADS];
            let at = i * (STATE / 4u) + part * ROW_QUADS;
            var sum = vec4<f32>();
            for (var q = 0u; q < ROW_QUADS; q = q + 1u) {  // unrolled
                let b = Bs[at + q];
                let c = Cs[at + q];
                S[q][0u] = now.y * S[q][0u] + b.x * v;
                S[q][1u] = now.y * S[q][1u] + b.y * v;
                S[q][2u] = now.y * S[q][2u] + b.z * v;
                S[q][3u] = now.y * S[q][3u] + b.w * v;
                sum = sum + c.x * S[q][0u] + c.y * S[q][1u] + c.z * S[q][2u] + c.w * S[q][3u];
            }
            sums[i * WG + lane] = sum;
        }
        workgroupBarrier();
        for (var i = lane; i < count * QUADS; i = i + WG) {
            let column = i % QUADS;
            var sum = skip * vs[i];
            for (var p = 0u; p < PARTS; p = p + 1u) {
                sum = sum + sums[i / QUADS * WG + p * QUADS + column];
            }
            if (begin_quad + column < quads) {
                if (GATED) {
                    let row = (t + i / QUADS) * params.stride + params.gate_first;
                    let at = row + 4u * (head * quads + begin_quad + column);
                    sum = sum * silu4(vec4<f32>(projected[at], projected[at + 1u], projected[at + 2u], projected[at + 3u]));
                }
                out[((t + i / QUADS) * params.heads + head) * quads + begin_quad + column] = sum;
            }
        }
        workgroupBarrier();
        t = t + count;
        if (SINGLE || t >= rows || !continues(t, 1u)) {
            break;
        }
    }
    for (var q = 0u; q < ROW_QUADS; q = q + 1u) {  // unrolled
        if (there) {
            state[base + 4u * q * quads] = S[q][0u];
            state[base + (4u * q + 1u) * quads] = S[q][1u];
            state[base + (4u * q + 2u) * quads] = S[q][2u];
            state[base + (4u * q + 3u) * quads] = S[q][3u];
        }
    }
}
