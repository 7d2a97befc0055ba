// Of each value head, row by row of a sequence, with q and k of length 1:
// S ← g S + k (sigmoid(beta) (v − g Sᵀ k))ᵀ, out = Sᵀ q / √KEYS, g = exp(rate · log(1 + exp(alpha + shift)))
// x is the queries and the keys of all key heads, and the values of all value heads. Sums of a row are taken once, before S
// changes: Sᵀ q after the change is g Sᵀ q + (k · q) change.
// Grid: for each row, value head and COLUMNS values of it one workgroup, folded; those of rows that are not the first of
// their sequence in the step return. A column of S is in the registers of PARTS lanes, KEYS / PARTS rows each.
// Needs KEYS in multiples of PARTS.

const COLUMNS: u32 = 32u;
const PARTS: u32 = 4u;
const WG: u32 = 128u;  // COLUMNS · PARTS
const KEYS: u32 = 128u;  // width of a key
const ROWS: u32 = 32u;   // KEYS / PARTS
const SINGLE: bool = false;  // each row is of another sequence
const GROUPED: bool = false;  // neighbouring value heads have the same key head

struct Params {
    key_heads: u32,
    value_heads: u32,
    values: u32,  // width of a value
    stride: u32,  // between rows of alpha and beta
    alpha_first: u32,
    beta_first: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;              // [tokens, 2 · key_heads · KEYS + value_heads · values]
@group(0) @binding(1) var<storage, read> alpha: array<f32>;          // [tokens, stride]
@group(0) @binding(2) var<storage, read> beta: array<f32>;           // [tokens, stride]
@group(0) @binding(3) var<storage, read> decay: array<f32>;          // [2, value_heads]: rate, shift
@group(0) @binding(4) var<storage, read> batch: array<vec4<u32>>;    // [1 + tokens]
@group(0) @binding(5) var<storage, read> page_table: array<u32>;
@group(0) @binding(6) var<storage, read_write> state: array<f32>;    // [states, value_heads, KEYS, values]
@group(0) @binding(7) var<storage, read_write> out: array<f32>;      // [tokens, value_heads, values]
@group(0) @binding(8) var<uniform> params: Params;

var<workgroup> keys: array<f32, KEYS>;
var<workgroup> queries: array<f32, KEYS>;
var<workgroup> sums: array<vec4<f32>, WG>;   // of a lane's rows: g S k, g S q, k k, q q
var<workgroup> products: array<f32, WG>;     // of a lane's rows: k q

fn state_count() -> u32 {
    return arrayLength(&state) / (params.value_heads * KEYS * params.values);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let blocks = (params.values + COLUMNS - 1u) / COLUMNS;
    let index = group.x + group.y * groups.x;
    let head = index / blocks % params.value_heads;
    let first = index / blocks / params.value_heads;
    let rows = batch_rows();
    if (first >= rows || (!SINGLE && continues(first, 1u))) {
        return;
    }
    let column = index % blocks * COLUMNS + lane % COLUMNS;
    let there = column < params.values;
    let first_row = lane / COLUMNS * ROWS;
    let key_head = select(head % params.key_heads, head / (params.value_heads / params.key_heads), GROUPED);
    let channels = 2u * params.key_heads * KEYS + params.value_heads * params.values;
    let begin = batch_row(first);
    let base = (state_row(begin) * params.value_heads + head) * KEYS * params.values + column;

    var S: array<f32, ROWS>;
    for (var r = 0u; r < ROWS; r = r + 1u) {
        S[r] = 0.0;
        if (there && begin.position > 0u) {
            S[r] = state[base + (first_row + r) * params.values];
        }
    }
    let spare = spare_row(begin);
    for (var t = first; t < rows; t = t + 1u) {
        if (t > first && (SINGLE || !continues(t, 1u))) {
            break;
        }
        if (!SINGLE && t > first && spare != NONE && there) {
            let row = min(spare + t - first - 1u, state_count() - 1u);
            let place = (row * params.value_heads + head) * KEYS * params.values + column;
            for (var r = 0u; r < ROWS; r = r + 1u) {
                state[place + (first_row + r) * params.values] = S[r];
            }
        }
        let q_at = t * channels + key_head * KEYS;
        for (var i = lane; i < KEYS; i = i + WG) {
            queries[i] = x[q_at + i];
            keys[i] = x[q_at + params.key_heads * KEYS + i];
        }
        let g = decay_of(alpha[t * params.stride + params.alpha_first + head], decay[head], decay[params.value_heads + head]);
        workgroupBarrier();
        var sum = vec4<f32>();
        var product = 0.0;
        for (var r = 0u; r < ROWS; r = r + 1u) {
            let k = keys[first_row + r];
            let q = queries[first_row + r];
            S[r] = g * S[r];
            sum = sum + vec4<f32>(S[r] * k, S[r] * q, k * k, q * q);
            product = product + k * q;
        }
        sums[lane] = sum;
        products[lane] = product;
        workgroupBarrier();
        sum = vec4<f32>();
        product = 0.0;
        for (var part = 0u; part < PARTS; part = part + 1u) {
            sum = sum + sums[part * COLUMNS + lane % COLUMNS];
            product = product + products[part * COLUMNS + lane % COLUMNS];
        }
        let k_scale = inverseSqrt(sum.z + NORM_EPS);
        let q_scale = inverseSqrt(sum.w + NORM_EPS) * inverseSqrt(f32(KEYS));
        var value = 0.0;
        if (there) {
            value = x[t * channels + 2u * params.key_heads * KEYS + head * params.values + column];
        }
        let learned = sigmoid(beta[t * params.stride + params.beta_first + head]);
        let change = (value - sum.x * k_scale) * learned * k_scale;
        for (var r = 0u; r < ROWS; r = r + 1u) {
            S[r] = S[r] + keys[first_row + r] * change;
        }
        if (there && first_row == 0u) {
            out[(t * params.value_heads + head) * params.values + column] = (sum.y + product * change) * q_scale;
        }
        workgroupBarrier();
    }
    for (var r = 0u; r < ROWS; r = r + 1u) {
        if (there) {
            state[base + (first_row + r) * params.values] = S[r];
        }
    }
}
