// How a row is sampled: the records of `outputs` and what follows from them. Needs: outputs, params.width, keys.

const LEAST: f32 = 1e-30;  // stands for a temperature or a top_p of 0
const REACH: f32 = 64.0;   // a logit so many temperatures below the largest has no weight: 2^24 of them add up to 3e-21

struct Settings {
    row: u32,          // of the batch
    slot: u32,         // of the sequence
    temperature: f32,  // 0: the largest logit
    top_k: u32,        // 0: off
    top_p: f32,        // 1: off
    min_p: f32,        // 0: off
    seed: vec2<u32>,
}

fn settings_of(output: u32) -> Settings {
    let a = outputs[2u * output];
    let b = outputs[2u * output + 1u];
    return Settings(a.x, a.y, bitcast<f32>(a.z), a.w, bitcast<f32>(b.x), bitcast<f32>(b.y), b.zw);
}

fn wants_top_k(given: Settings) -> bool {
    return given.temperature > 0.0 && given.top_k > 0u && given.top_k < params.width;
}

fn wants_top_p(given: Settings) -> bool {
    return given.temperature > 0.0 && given.top_p < 1.0;
}

// Does a threshold have to be searched for? That of min_p follows from the largest logit.
fn searches(given: Settings) -> bool {
    return wants_top_k(given) || wants_top_p(given);
}

// The lowest key that is not more than `reach` below the largest logit. The difference of two logits is exact where it
// matters, a threshold near a large one is not: what rounding did to it is undone.
fn key_below(top: u32, reach: f32) -> u32 {
    if (reach <= 0.0) {
        return min(top, HIGHEST);  // arithmetic may take the smallest numbers for 0
    }
    let peak = value_of(top);
    var key = clamp(key_of(bitcast<u32>(peak - reach)), LOWEST, top);
    if (peak - value_of(key) > reach) {
        key = key + 1u;
    } else if (peak - value_of(key - 1u) <= reach) {
        key = key - 1u;
    }
    return clamp(key, LOWEST, top);
}

// The lowest key that has any weight.
fn floor_of(given: Settings, top: u32) -> u32 {
    if (given.temperature == 0.0) {
        return top;
    }
    return key_below(top, given.temperature * REACH);
}

// The lowest key that min_p keeps.
fn min_p_floor(given: Settings, top: u32) -> u32 {
    if (given.temperature == 0.0 || given.min_p <= 0.0) {
        return LOWEST;
    }
    return key_below(top, given.temperature * -log(min(given.min_p, 1.0)));
}

// What the largest key of a row and its settings say of its other keys.
struct Span {
    top: u32,          // largest key
    floor: u32,        // lowest key that has any weight
    peak: f32,         // value of the largest key
    temperature: f32,
}

fn span_of(given: Settings, top: u32) -> Span {
    return Span(top, floor_of(given, top), value_of(top), max(given.temperature, LEAST));
}

// Probabilities of logits, as multiples of the largest logit's.
fn weights_of(span: Span, keys: vec4<u32>) -> vec4<f32> {
    return exp(max((values_of(keys) - vec4<f32>(span.peak)) / span.temperature, vec4<f32>(-REACH)));
}

fn weight_of(span: Span, key: u32) -> f32 {
    return exp(max((value_of(key) - span.peak) / span.temperature, -REACH));
}
