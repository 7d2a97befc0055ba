// Blocks of format q4 or codes in workgroup memory, each part in an array of its own, so that threads hit different banks.
// Exports: stage_block(at, weights), staged_block(at). Needs: Packed of the format, const W_SLOTS.

var<workgroup> w_words: array<vec4<u32>, W_SLOTS>;
var<workgroup> w_scales: array<f32, W_SLOTS>;

fn stage_block(at: u32, p: Packed) {
    w_words[at] = p.w;
    w_scales[at] = p.scale;
}

fn staged_block(at: u32) -> Packed {
    return Packed(w_words[at], w_scales[at]);
}
