// Bins of equal width below the largest logit of a row, down to the smallest or to where there is no weight any more.
// What they count tells sampling where to look, and nothing else: no result depends on how a bin is rounded.
// Needs: extents [rows, parts] of (largest key, ~smallest key), params.parts ≤ WG, const WG, keys, settings, extent.

const BINS: u32 = 1024u;

struct Scale {
    bins: f32,  // per difference of 2 between logits: halves do not overflow
    step: f32,  // temperatures per bin, at most REACH / BINS = 1 / 16
}

// (largest key, ~smallest key) of a row; at least the lowest key of all. Call from uniform control flow.
fn extent_of(row: u32, lane: u32) -> vec2<u32> {
    var mine = vec2<u32>();
    if (lane < params.parts) {
        mine = extents[row * params.parts + lane];
    }
    return max(workgroup_extent(mine, lane), vec2<u32>(LOWEST, 0u));
}

fn scale_of(span: Span, extent: vec2<u32>) -> Scale {
    let half = 0.5 * span.peak - 0.5 * value_of(~extent.y);
    let bins = f32(BINS) / max(min(0.5 * REACH * span.temperature, half), LEAST);
    return Scale(bins, 2.0 / (bins * span.temperature));
}

// How many bins keys are below the top, with the part of a bin. Those without weight count as the last bin.
fn depths_of(span: Span, scale: Scale, keys: vec4<u32>) -> vec4<f32> {
    let half = vec4<f32>(0.5 * span.peak) - 0.5 * values_of(max(keys, vec4<u32>(span.floor)));
    return half * scale.bins;
}

fn bins_at(depths: vec4<f32>) -> vec4<u32> {
    return vec4<u32>(min(depths, vec4<f32>(f32(BINS - 1u))));
}
