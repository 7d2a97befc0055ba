// Blocks of format q2_k in workgroup memory, each part in an array of its own, so that threads hit different banks.
// Exports: stage_block(at, weights), staged_block(at). Needs: Packed of the format, const W_SLOTS.

var<workgroup> w_low: array<vec2<u32>, W_SLOTS>;
var<workgroup> w_scales: array<vec4<f32>, W_SLOTS>;

fn stage_block(at: u32, p: Packed) {
    w_low[at] = p.low;
    w_scales[at] = p.scale;
}

fn staged_block(at: u32) -> Packed {
    return Packed(w_low[at], w_scales[at]);
}
