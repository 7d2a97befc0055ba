// Logits as keys: u32 of the same order as the values. NaN counts as −inf, −0 as 0. Needs: logits, the bits of f32; WG.

const NOTHING: u32 = 0x007fffffu;  // key of −inf
const LOWEST: u32 = 0x00800000u;   // key of the lowest finite f32
const HIGHEST: u32 = 0xff7fffffu;  // key of the highest finite f32; above it is +inf alone

fn keys_of(bits: vec4<u32>) -> vec4<u32> {
    let ordered = select(bits | vec4<u32>(0x80000000u), ~bits, bits > vec4<u32>(0x80000000u));
    return select(ordered, vec4<u32>(NOTHING), (bits & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u));
}

fn key_of(bits: u32) -> u32 {
    return keys_of(vec4<u32>(bits)).x;
}

// The values to compute with: +inf is as the highest finite f32.
fn values_of(keys: vec4<u32>) -> vec4<f32> {
    let finite = clamp(keys, vec4<u32>(LOWEST), vec4<u32>(HIGHEST));
    let bits = select(~finite, finite & vec4<u32>(0x7fffffffu), finite >= vec4<u32>(0x80000000u));
    return bitcast<vec4<f32>>(bits);
}

fn value_of(key: u32) -> f32 {
    return values_of(vec4<u32>(key)).x;
}

// Keys of the logits i, i + WG, i + 2 WG and i + 3 WG: four loads under way at once. From `end` on there is nothing.
fn four_keys(i: u32, end: u32) -> vec4<u32> {
    let at = vec4<u32>(i) + vec4<u32>(0u, WG, 2u * WG, 3u * WG);
    let near = min(at, vec4<u32>(end - 1u));
    let bits = vec4<u32>(logits[near.x], logits[near.y], logits[near.z], logits[near.w]);
    return select(vec4<u32>(NOTHING), keys_of(bits), at < vec4<u32>(end));
}
