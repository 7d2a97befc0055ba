// Softmax over keys and one more score, which has no value, for each query head. Exports: SINKS, sink_of(head). Same as
// sinks_none.

@group(0) @binding(0) var<storage, read> sinks: array<f32>;  // [query heads]

const SINKS: bool = true;

fn sink_of(head: u32) -> f32 {
    return sinks[head];
}
