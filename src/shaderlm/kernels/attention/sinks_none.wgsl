// Softmax over keys alone. Exports: SINKS, sink_of(head). Same as sinks_heads.

const SINKS: bool = false;

fn sink_of(head: u32) -> f32 {
    return 0.0;
}
