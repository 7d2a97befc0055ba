// The token that was sampled is one more of its sequence, for penalties. Exports: count_token(). Only the workgroup of
// an output touches the counts of its sequence. Needs: params.width.

@group(0) @binding(0) var<storage, read_write> counts: array<u32>;  // [sequence slots, width]

fn count_token(slot: u32, token: u32) {
    counts[slot * params.width + token] = counts[slot * params.width + token] + 1u;
}
