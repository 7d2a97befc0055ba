// All of a layer between its products, for rows of different sequences: a short convolution and silu of the columns q, k, v
// of x; the gated delta rule, as in gated_delta_rule; a norm of each head of the sums; times silu of columns of `gates`.
// Grid: one workgroup per row and value head, folded. A lane has four columns of S and ROWS rows of them in registers; PARTS
// lanes share these columns. Every workgroup makes the convolution of its q and k for itself, and one of those that have the
// same key head writes its state: the others read no value of that ring which is written.
// Needs KEYS = PARTS · ROWS, values of a head in quads, WG = PARTS · quads.

const KEYS: u32 = 128u;    // width of a key
const VALUES: u32 = 128u;  // width of a value
const PARTS: u32 = 8u;
const ROWS: u32 = 16u;     // KEYS / PARTS
const WG: u32 = 256u;      // PARTS · VALUES / 4
const QUADS: u32 = VALUES / 4u;
const TAPS: u32 = 4u;
const GROUPED: bool = false;  // neighbouring value heads have the same key head

struct Params {
    key_heads: u32,
    value_heads: u32,
    stride: u32,  // between rows of x
    first: u32,   // column of x
    gates_stride: u32,  // between rows of gates
    gate_first: u32,
    alpha_first: u32,
    beta_first: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;                // [tokens, stride]
@group(0) @binding(1) var<storage, read> gates: array<f32>;            // [tokens, gates_stride]
@group(0) @binding(2) var<storage, read> conv_weight: array<f32>;      // [channels, TAPS]
@group(0) @binding(3) var<storage, read> decay: array<f32>;            // [2, value_heads]: rate, shift
@group(0) @binding(4) var<storage, read> norm_weight: array<f32>;      // [VALUES]
@group(0) @binding(5) var<storage, read> batch: array<vec4<u32>>;      // [1 + tokens]
@group(0) @binding(6) var<storage, read> page_table: array<u32>;
@group(0) @binding(7) var<storage, read_write> conv_state: array<f32>;   // [states, TAPS, channels]
@group(0) @binding(8) var<storage, read_write> state: array<vec4<f32>>;  // [states, value_heads, KEYS, QUADS]
@group(0) @binding(9) var<storage, read_write> out: array<f32>;          // [tokens, value_heads, VALUES]
@group(0) @binding(10) var<uniform> params: Params;

var<workgroup> columns: array<f32, 2u * KEYS + VALUES>;          // q, k, v
var<workgroup> sums: array<vec4<f32>, 2u * PARTS * QUADS>;       // of a part's rows: S k, S q
var<workgroup> products: array<vec4<f32>, PARTS>;                // of a part's rows: q q, k k, q k
var<workgroup> changes: array<vec4<f32>, QUADS>;
var<workgroup> results: array<vec4<f32>, QUADS>;

fn state_count() -> u32 {
    return arrayLength(&state) / (params.value_heads * KEYS * QUADS);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let t = index / params.value_heads;
    let head = index % params.value_heads;
    if (t >= batch_rows()) {
        return;
    }
    let row = batch_row(t);
    let slot = state_row(row);
    let quad = lane % QUADS;
    let first_row = lane / QUADS * ROWS;
    let base = ((slot * params.value_heads + head) * KEYS + first_row) * QUADS + quad;
    var S: array<vec4<f32>, ROWS>;  // registers
    for (var r = 0u; r < ROWS; r = r + 1u) {  // unrolled
        S[r] = vec4<f32>();
        if (row.position > 0u) {
            S[r] = state[base + r * QUADS];
        }
    }
    let shared_by = params.value_heads / params.key_heads;
    let key_head = select(head % params.key_heads, head / shared_by, GROUPED);
    let writes_keys = head == select(key_head, key_head * shared_by, GROUPED);
    let channels = 2u * params.key_heads * KEYS + params.value_heads * VALUES;
    for (var i = lane; i < 2u * KEYS + VALUES; i = i + WG) {
        var c = key_head * KEYS + i;
        if (i >= 2u * KEYS) {
            c = 2u * params.key_heads * KEYS + head * VALUES + i - 2u * KEYS;
        } else if (i >= KEYS) {
            c = (params.key_heads + key_head) * KEYS + i - KEYS;
        }
        let at = slot * TAPS * channels + c;
        let value = x[t * params.stride + params.first + c];
        var sum = conv_weight[c * TAPS + TAPS - 1u] * value;
        for (var back = 1u; back < TAPS; back = back + 1u) {
            if (back <= row.position) {
                let before = conv_state[at + (row.position - back) % TAPS * channels];
                sum = sum + conv_weight[c * TAPS + TAPS - 1u - back] * before;
            }
        }
        if (i >= 2u * KEYS || writes_keys) {
            conv_state[at + row.position % TAPS * channels] = value;
        }
        columns[i] = silu(sum);
    }
    let factor = t * params.gates_stride + head;
    let g = decay_of(gates[factor + params.alpha_first], decay[head], decay[params.value_heads + head]);
    let learned = sigmoid(gates[factor + params.beta_first]);
    workgroupBarrier();
    var by_k = vec4<f32>();
    var by_q = vec4<f32>();
    var product = vec4<f32>();
    for (var r = 0u; r < ROWS; r = r + 1u) {  // unrolled
        let q = columns[first_row + r];
        let k = columns[KEYS + first_row + r];
        by_k = by_k + S[r] * k;
        by_q = by_q + S[r] * q;
        product = product + vec4<f32>(q * q, k * k, q * k, 0.0);
    }
    sums[lane] = by_k;
    sums[WG + lane] = by_q;
    if (quad == 0u) {
        products[lane / QUADS] = product;
    }
    workgroupBarrier();
    if (lane < QUADS) {
        by_k = vec4<f32>();
        by_q = vec4<f32>();
        product = vec4<f32>();
        for (var part = 0u; part < PARTS; part = part + 1u) {  // unrolled
            by_k = by_k + sums[part * QUADS + lane];
            by_q = by_q + sums[WG + part * QUADS + lane];
            product = product + products[part];
        }
        let k_scale = inverseSqrt(product.y + NORM_EPS);
        let q_scale = inverseSqrt(product.x + NORM_EPS) * inverseSqrt(f32(KEYS));
        let at = 2u * KEYS + 4u * lane;
        let value = vec4<f32>(columns[at], columns[at + 1u], columns[at + 2u], columns[at + 3u]);
        changes[lane] = (value - g * k_scale * by_k) * learned * k_scale;
        results[lane] = (g * by_q + product.z * changes[lane]) * q_scale;
    }
    workgroupBarrier();
    let change = changes[quad];
    for (var r = 0u; r < ROWS; r = r + 1u) {  // unrolled
        state[base + r * QUADS] = g * S[r] + columns[KEYS + first_row + r] * change;
    }
    for (var i = lane; i < VALUES; i = i + WG) {
        var squares = 0.0;
        for (var j = 0u; j < QUADS; j = j + 1u) {  // unrolled
            squares = squares + dot(results[j], results[j]);
        }
        let at = head * VALUES + i;
        let normed = results[i / 4u][i % 4u] * inverseSqrt(squares / f32(VALUES) + params.eps) * norm_weight[i];
        out[t * params.value_heads * VALUES + at] = silu(gates[t * params.gates_stride + params.gate_first + at]) * normed;
    }
}
