// What the gated delta rule needs to know of a row and a value head beside S, for gated_delta_rule_columns:
// (g, g · |k|⁻¹, sigmoid(beta) · |k|⁻¹, g · |q|⁻¹ / √KEYS), and (k · q) · |q|⁻¹ / √KEYS
// Grid: one workgroup per row and key head, folded.

const WG: u32 = 32u;
const GROUPED: bool = false;  // neighbouring value heads have the same key head

struct Params {
    key_heads: u32,
    value_heads: u32,
    keys: u32,    // width of a key
    channels: u32,
    stride: u32,  // between rows of alpha and beta
    alpha_first: u32,
    beta_first: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;              // [tokens, channels]
@group(0) @binding(1) var<storage, read> alpha: array<f32>;          // [tokens, stride]
@group(0) @binding(2) var<storage, read> beta: array<f32>;           // [tokens, stride]
@group(0) @binding(3) var<storage, read> decay: array<f32>;          // [2, value_heads]: rate, shift
@group(0) @binding(4) var<storage, read> batch: array<vec4<u32>>;    // [1 + tokens]
@group(0) @binding(5) var<storage, read_write> row_factors: array<vec4<f32>>;  // [tokens, value_heads, 2]
@group(0) @binding(6) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let t = index / params.key_heads;
    let key_head = index % params.key_heads;
    if (t >= batch_rows()) {
        return;
    }
    let at = t * params.channels + key_head * params.keys;
    var squares = vec3<f32>();
    for (var i = lane; i < params.keys; i = i + WG) {
        let q = x[at + i];
        let k = x[at + params.key_heads * params.keys + i];
        squares = squares + vec3<f32>(q * q, k * k, q * k);
    }
    let q_scale = inverseSqrt(workgroup_sum(squares.x, lane) + NORM_EPS) * inverseSqrt(f32(params.keys));
    let k_scale = inverseSqrt(workgroup_sum(squares.y, lane) + NORM_EPS);
    let product = workgroup_sum(squares.z, lane);
    let shared_by = params.value_heads / params.key_heads;
    for (var i = lane; i < shared_by; i = i + WG) {
        let head = select(key_head + i * params.key_heads, key_head * shared_by + i, GROUPED);
        let g = decay_of(alpha[t * params.stride + params.alpha_first + head], decay[head], decay[params.value_heads + head]);
        let learned = sigmoid(beta[t * params.stride + params.beta_first + head]);
        let to = 2u * (t * params.value_heads + head);
        row_factors[to] = vec4<f32>(g, g * k_scale, learned * k_scale, g * q_scale);
        row_factors[to + 1u] = vec4<f32>(product * q_scale, 0.0, 0.0, 0.0);
    }
}
