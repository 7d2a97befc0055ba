// records[0] = (tokens, 0, 0, 0), records[1 + t] = (0, rows of the span of t − 1, t, its first row and RUN): a token batch
// in which the rows of a span see all of it. A row without a span has no RUN, and out[t] = 0.
// Grid: one thread per row, folded.

const WG: u32 = 64u;
const RUN: u32 = 0x80000000u;

struct Params {
    tokens: u32,
    width: u32,  // of a row of out
}

@group(0) @binding(0) var<storage, read> spans: array<vec2<u32>>;          // [tokens]
@group(0) @binding(1) var<storage, read_write> records: array<vec4<u32>>;  // [1 + tokens]
@group(0) @binding(2) var<storage, read_write> out: array<f32>;            // [tokens, width]
@group(0) @binding(3) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let t = (group.x + group.y * groups.x) * WG + lane;
    if (t >= params.tokens) {
        return;
    }
    if (t == 0u) {
        records[0] = vec4<u32>(params.tokens, 0u, 0u, 0u);
    }
    let span = min(spans[t], vec2<u32>(params.tokens));
    let there = span.y > span.x;
    for (var i = 0u; i < select(params.width, 0u, there); i = i + 1u) {
        out[t * params.width + i] = 0.0;
    }
    records[1u + t] = vec4<u32>(0u, select(0u, span.y - span.x - 1u, there), t, select(0u, span.x | RUN, there));
}
