// Operands and parameters of linear_q4gsw with weights as they are given.

const HAS_BIAS: bool = false;

struct Params {
    tokens: u32,
    k: u32,
    n: u32,           // rows of this range of the weight
    words: u32,       // u32 words per weight row
    group_size: u32,
    groups: u32,
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;          // [tokens, k]
@group(0) @binding(1) var<storage, read> weight: array<u32>;     // [n, words], 8 nibbles a word, nibble j at bits 4j
@group(0) @binding(2) var<storage, read> scales: array<f32>;     // [groups, n]
@group(0) @binding(3) var<storage, read> bias: array<f32>;       // [n] if HAS_BIAS
@group(0) @binding(4) var<storage, read> residual: array<f32>;   // unused: what the packed routes have here
@group(0) @binding(5) var<storage, read_write> out: array<f32>;  // [tokens, n_total]
@group(0) @binding(6) var<uniform> params: Params;
