// bytes[m], units[m] = q(prologue(x[m]))        rows of inputs rounded to 16 bits with one unit per block of 32
// For products of several rows: each row is rounded once, not by every workgroup of the product. Four lanes round a block
// (shared/int16), in `parts` workgroups per row. With a norm a row has one workgroup, which knows Σ x² at the end and
// multiplies the units by the norm's factor. A block's vectors are h and l of inputs 0 … 15, then of 16 … 31. Rows that pad the shape are left as they are. The prologue is included.
// Grid: tokens · parts workgroups, folded. Needs: k % 32 == 0; subgroups of four lanes or more, of consecutive lanes;
// parts = 1 with a norm.

const WG: u32 = 256u;
const BLOCKS_FIRST: bool = false;  // the four vectors of a block are neighbours, not those of neighbouring blocks

struct Params {
    tokens: u32,
    k: u32,       // multiple of 32
    parts: u32,   // workgroups per row
    eps: f32,     // of the norm
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;           // [tokens, k / 4]
@group(0) @binding(1) var<storage, read_write> bytes: array<vec4<u32>>; // [tokens, 4, k / 32] or [tokens, k / 32, 4]
@group(0) @binding(2) var<storage, read_write> units: array<vec4<f32>>; // [tokens, k / 32] of (unit, unit · Σ, unit · Σ, 0)
@group(0) @binding(3) var<uniform> params: Params;

var<workgroup> squares: array<f32, WG / 4u>;  // Σ x² of what each subgroup rounded

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let size = subgroupAdd(1u);  // lanes of a subgroup
    let task = group.x + group.y * groups.x;
    let row = task / params.parts;
    if (row >= row_count()) {
        return;
    }
    let blocks = params.k / 32u;
    let quarter = lane % 4u;
    let stride = params.parts * (WG / 4u);
    let start = task % params.parts * (WG / 4u);
    var square = 0.0;
    for (var base = start; base < blocks; base = base + stride) {
        let block = base + lane / 4u;
        let there = block < blocks;
        let i = select(0u, block * 8u + quarter * 2u, there);
        let v0 = x[row * (params.k / 4u) + i];
        let v1 = x[row * (params.k / 4u) + i + 1u];
        let rounded = round_quarter(weighted(i, v0), weighted(i + 1u, v1), quarter);
        if (there) {
            let at = select(quarter * blocks + block, block * 4u + quarter, BLOCKS_FIRST);
            bytes[row * 4u * blocks + at] = rounded.bytes;
            if (quarter == 0u) {
                units[row * blocks + block] = vec4<f32>(rounded.unit, 0.0);
            }
            square = square + dot(v0, v0) + dot(v1, v1);
        }
    }
    if (NORM) {
        let part = subgroupAdd(square);
        if (lane % size == 0u) {
            squares[lane / size] = part;
        }
        workgroupBarrier();
        var total = 0.0;
        for (var i = 0u; i < WG / size; i = i + 1u) {
            total = total + squares[i];
        }
        let scale = factor(total);
        if (quarter == 0u) {
            for (var block = lane / 4u; block < blocks; block = block + WG / 4u) {
                units[row * blocks + block] = units[row * blocks + block] * scale;
            }
        }
    }
}
