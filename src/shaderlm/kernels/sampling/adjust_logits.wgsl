// out[r, i] = logits[r, i], penalised if token i is of the sequence so far, plus its bias; −inf where a mask forbids it
// Penalties: divided by repetition if positive, else multiplied; less presence and frequency · how often it is there.
// Pairs of biases whose token has the bit RECENT say how often a token is there beside what counts say.
// Grid: one workgroup per (row, chunk), folded.

const WG: u32 = 256u;
const CHUNK: u32 = 2048u;
const MINUS_INFINITY: u32 = 0xff800000u;
const RECENT: u32 = 0x80000000u;

struct Params {
    rows: u32,
    width: u32,
    parts: u32,  // chunks per row
}

@group(0) @binding(0) var<storage, read> logits: array<u32>;               // [rows, width], the bits of f32
@group(0) @binding(1) var<storage, read> adjustments: array<vec4<u32>>;    // [rows, 2]
@group(0) @binding(2) var<storage, read> counts: array<u32>;               // [sequence slots, width]
@group(0) @binding(3) var<storage, read> biases: array<vec2<u32>>;         // token, bits of its bias
@group(0) @binding(4) var<storage, read> masks: array<u32>;                // rows of width bits, the lowest first; 1: allowed
@group(0) @binding(5) var<storage, read_write> out: array<u32>;            // [rows, width], the bits of f32
@group(0) @binding(6) var<uniform> params: Params;

fn is_finite(bits: u32) -> bool {
    return (bits & 0x7f800000u) != 0x7f800000u;
}

fn penalised(x: f32, count: u32, given: Adjustment) -> f32 {
    var y = x * given.repetition;
    if (x > 0.0) {
        y = x / given.repetition;
    }
    return y - given.presence - given.frequency * f32(count);
}

fn allowed(given: Adjustment, token: u32) -> bool {
    if (given.mask == NOT_WANTED) {
        return true;
    }
    let words = (params.width + 31u) / 32u;
    return ((masks[given.mask * words + token / 32u] >> (token % 32u)) & 1u) == 1u;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let row = index / params.parts;
    if (row >= output_count()) {
        return;
    }
    let given = adjustment_of(row);
    let penalises = given.repetition != 1.0 || given.presence != 0.0 || given.frequency != 0.0;
    let tokens = given.history * params.width;  // of its sequence
    let base = row * params.width;
    let first = (index % params.parts) * CHUNK;
    let end = min(first + CHUNK, params.width);
    for (var i = first + lane; i < end; i = i + WG) {
        var bits = logits[base + i];
        if (penalises) {
            let count = counts[tokens + i];
            if (count > 0u && is_finite(bits)) {  // the others stay what they are
                bits = bitcast<u32>(penalised(bitcast<f32>(bits), count, given));
            }
        }
        out[base + i] = select(MINUS_INFINITY, bits, allowed(given, i));
    }
    if (given.bias_count > 0u) {
        storageBarrier();  // another lane has written the logit
        for (var i = lane; i < given.bias_count; i = i + WG) {
            let pair = biases[given.bias_first + i];
            let token = pair.x ^ RECENT;
            if (penalises && token >= first && token < end && allowed(given, token)) {
                let bits = logits[base + token];
                if (is_finite(bits)) {
                    let count = counts[tokens + token] + u32(bitcast<f32>(pair.y));
                    out[base + token] = bitcast<u32>(penalised(bitcast<f32>(bits), count, given));
                }
            }
        }
        storageBarrier();  // a bias is added to what is penalised
        for (var i = lane; i < given.bias_count; i = i + WG) {
            let bias = biases[given.bias_first + i];
            if (bias.x >= first && bias.x < end) {
                let bits = out[base + bias.x];
                if (!is_finite(bias.y)) {
                    out[base + bias.x] = bias.y;
                } else if (is_finite(bits)) {
                    out[base + bias.x] = bitcast<u32>(bitcast<f32>(bits) + bitcast<f32>(bias.y));
                }
            }
        }
    }
}
