// What is done with a row of logits beside sampling: the records of `adjustments`, graph/sampling.py describes them.
// Needs: adjustments.

const NOT_WANTED: u32 = 0xffffffffu;  // of mask and logprobs

struct Adjustment {
    repetition: f32,  // 1: off
    presence: f32,    // 0: off
    frequency: f32,   // 0: off
    bias_first: u32,
    bias_count: u32,
    mask: u32,        // row of masks
    logprobs: u32,    // how many of the largest; that of the token itself comes with them
    history: u32,     // row of counts
}

fn adjustment_of(output: u32) -> Adjustment {
    let a = adjustments[2u * output];
    let b = adjustments[2u * output + 1u];
    let penalties = bitcast<vec3<f32>>(a.xyz);
    return Adjustment(penalties.x, penalties.y, penalties.z, a.w, b.x, b.y, b.z, b.w);
}
