// x_half[t, k] = f16(p[t, k] · 2^e),  row_scale[t] = 2^−e        p = prologue(x)
// The prologue is included, and where x comes from: it lies there, or it is added up here from parts of a product.
// e makes the largest magnitude of a row 2^14 … 2^15: nothing becomes infinite, and small rows keep their digits.
// x_half lies as linear_matrix reads it: of BLOCKS blocks of 32 values first the first 8 of each, then the next 8, up to
// whole groups of blocks, with zeros after the last; eight in the order of shared/dequant_f16. With MATRIX_ROWS > 1 every
// matrix of that order lies by itself, as linear_matrix_few reads it.
// Grid: a workgroup per row, folded. Padding rows are not written.

const WG: u32 = 256u;
const BLOCKS: u32 = 8u;
const MATRIX_ROWS: u32 = 1u;   // rows of a matrix, if each matrix lies by itself
const MATRIX_WORDS: u32 = 1u;  // and vec4<u32> of its rows
const KEEP: u32 = 4u;  // quads per lane that stay in registers; those after them are read again

struct Params {
    tokens: u32,
    k: u32,      // values of a row that count for its norm
    quads: u32,  // of a row of x
    stride: u32, // quads of a row of x_half
    eps: f32,
    split: u32,  // parts of x, where it is added up here,
    adds: u32,   // and whether something is added to them
}

@group(0) @binding(0) var<storage, read_write> x_half: array<vec2<u32>>; // [tokens, stride]
@group(0) @binding(1) var<storage, read_write> row_scale: array<f32>;    // [tokens]
@group(0) @binding(2) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if (row >= row_count()) {
        return;
    }
    var kept: array<vec4<f32>, KEEP>;  // registers
    var squares = 0.0;
    var large = vec4<f32>();
    for (var i = 0u; i < KEEP; i = i + 1u) {  // unrolled
        let quad = lane + i * WG;
        if (quad < params.quads) {
            let value = load_x(row, quad);
            squares = squares + dot(value, value);
            kept[i] = weighted(quad, value);
            large = max(large, abs(kept[i]));
        }
    }
    for (var quad = lane + KEEP * WG; quad < params.quads; quad = quad + WG) {
        let value = load_x(row, quad);
        squares = squares + dot(value, value);
        large = max(large, abs(weighted(quad, value)));
    }
    var root = 1.0;
    if (NORM) {
        root = factor(workgroup_sum(squares, lane));
    }
    let largest = workgroup_max(max(max(large.x, large.y), max(large.z, large.w)), lane) * root;
    // By the exponent's bits: 2^14 / 2^floor(log2(largest)). Those below 2^−107 are left near zero.
    let exponent = clamp(bitcast<u32>(largest) >> 23u, 20u, 254u);
    let scale = bitcast<f32>((268u - exponent) << 23u) * root;
    if (lane == 0u) {
        row_scale[row] = bitcast<f32>((exponent - 14u) << 23u);
    }
    for (var i = 0u; i < KEEP; i = i + 1u) {  // unrolled
        let quad = lane + i * WG;
        if (quad < params.quads) {
            x_half[place(row, quad)] = quad_halves(kept[i] * scale);
        }
    }
    for (var quad = lane + KEEP * WG; quad < params.quads; quad = quad + WG) {
        x_half[place(row, quad)] = quad_halves(weighted(quad, load_again(row, quad)) * scale);
    }
    for (var quad = params.quads + lane; quad < params.stride; quad = quad + WG) {
        x_half[place(row, quad)] = vec2<u32>();
    }
}

// Where a quad lies in x_half.
fn place(row: u32, quad: u32) -> u32 {
    let block = quad / 8u;
    let word = (block / BLOCKS * 4u + quad % 8u / 2u) * BLOCKS + block % BLOCKS;  // of a row
    let first = row / MATRIX_ROWS * MATRIX_ROWS * (params.stride / 2u);
    let matrix = word / MATRIX_WORDS * MATRIX_ROWS + row % MATRIX_ROWS;
    return (first + matrix * MATRIX_WORDS + word % MATRIX_WORDS) * 2u + quad % 2u;
}
