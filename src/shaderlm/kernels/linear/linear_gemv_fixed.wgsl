// out[0, n] = bias[n] + Σ_k x[0, k] · w[n, k]        m = 1, weights in the format that is included
// WG threads make WG / TEAM teams; a team computes ROWS rows (1, 2 or 4), its lanes share their k in blocks of
// 32: a block of x serves all rows, a block of q4 weights is one 16-byte load. x is staged in workgroup memory,
// STAGE blocks at a time: read straight from the buffer, the lanes' blocks lie 128 bytes apart, and each load
// touches as many cache lines as there are lanes. There it becomes 24-bit fixed point, v = 65536·h + 256·m + l with
// signed bytes h, m, l and one scale per block of 32: products are then integer dot products of bytes, exact, four
// at a time, and cost less than unpacking weights to f32. Each x is rounded by at most 1/16,646,144 of the largest of
// its block, which is what f32 arithmetic does to a sum that holds that one. Weights are loaded one block ahead:
// before the first wait for x, and before the arithmetic of the block at hand.
// Grid: ceil(n / (ROWS · WG / TEAM)) workgroups, folded. Needs k % 32 == 0 and STAGE % TEAM == 0.

const WG: u32 = 256u;
const TEAM: u32 = 64u;
const ROWS: u32 = 4u;
const STAGE: u32 = 64u;
const HAS_BIAS: bool = false;

struct Params {
    m: u32,
    k: u32,           // multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // scales per row
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,
}

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;      // [m, k / 4]
@group(0) @binding(1) var<storage, read> weight: array<vec4<u32>>; // [n, …] as the included format lays it out
@group(0) @binding(2) var<storage, read> scales: array<u32>;       // [n, groups] f32, or f16 in pairs
@group(0) @binding(3) var<storage, read> bias: array<f32>;         // [n] if HAS_BIAS
@group(0) @binding(4) var<storage, read_write> out: array<f32>;    // [m, n_total]
@group(0) @binding(5) var<uniform> params: Params;

// A block takes nine quads, an odd number, so that lanes that read neighbouring blocks hit different banks.
// First it holds x; then h in quads 0 and 1, m in 2 and 3, l in 4 and 5, and (scale, Σ h, Σ m, Σ l) in 6.
var<workgroup> x_tile: array<vec4<u32>, STAGE * 9u>;

// The lowest signed byte of each number, and what is left above it.
fn low_digit(v: vec4<i32>) -> vec4<i32> {
    return ((v + vec4<i32>(128)) & vec4<i32>(255)) - vec4<i32>(128);
}

fn rest(v: vec4<i32>) -> vec4<i32> {
    return (v - low_digit(v)) >> vec4<u32>(8u);
}

// Turn half a block, four quads of x, into digits; returns their sums (h, m, l).
fn digits(at: u32, half: u32, v0: vec4<i32>, v1: vec4<i32>, v2: vec4<i32>, v3: vec4<i32>) -> vec3<i32> {
    let r0 = rest(v0);
    let r1 = rest(v1);
    let r2 = rest(v2);
    let r3 = rest(v3);
    x_tile[at + half] = vec4<u32>(pack4xI8(rest(r0)), pack4xI8(rest(r1)), pack4xI8(rest(r2)), pack4xI8(rest(r3)));
    x_tile[at + 2u + half] = vec4<u32>(
        pack4xI8(low_digit(r0)), pack4xI8(low_digit(r1)), pack4xI8(low_digit(r2)), pack4xI8(low_digit(r3)),
    );
    x_tile[at + 4u + half] = vec4<u32>(
        pack4xI8(low_digit(v0)), pack4xI8(low_digit(v1)), pack4xI8(low_digit(v2)), pack4xI8(low_digit(v3)),
    );
    let h = rest(r0) + rest(r1) + rest(r2) + rest(r3);
    let m = low_digit(r0) + low_digit(r1) + low_digit(r2) + low_digit(r3);
    let l = low_digit(v0) + low_digit(v1) + low_digit(v2) + low_digit(v3);
    return vec3<i32>(h.x + h.y + h.z + h.w, m.x + m.y + m.z + m.w, l.x + l.y + l.z + l.w);
}

fn magnitude(v: vec4<f32>) -> vec4<u32> {
    return bitcast<vec4<u32>>(v) & vec4<u32>(0x7FFFFFFFu);
}

fn fix_block(at: u32) {
    let x0 = bitcast<vec4<f32>>(x_tile[at]);
    let x1 = bitcast<vec4<f32>>(x_tile[at + 1u]);
    let x2 = bitcast<vec4<f32>>(x_tile[at + 2u]);
    let x3 = bitcast<vec4<f32>>(x_tile[at + 3u]);
    let x4 = bitcast<vec4<f32>>(x_tile[at + 4u]);
    let x5 = bitcast<vec4<f32>>(x_tile[at + 5u]);
    let x6 = bitcast<vec4<f32>>(x_tile[at + 6u]);
    let x7 = bitcast<vec4<f32>>(x_tile[at + 7u]);
    // The largest magnitude, compared as bits: their order is that of the numbers, with NaN above all.
    let most = max(
        max(max(magnitude(x0), magnitude(x1)), max(magnitude(x2), magnitude(x3))),
        max(max(magnitude(x4), magnitude(x5)), max(magnitude(x6), magnitude(x7))),
    );
    let top = max(max(most.x, most.y), max(most.z, most.w));
    let unit = bitcast<f32>(top) / 8323072.0;  // 127 · 65,536
    let per_unit = select(1.0 / unit, 0.0, top < 0x0DA24260u);  // below 1e-30 a block counts as zeros
    let sums = digits(
        at, 0u, vec4<i32>(round(x0 * per_unit)), vec4<i32>(round(x1 * per_unit)),
        vec4<i32>(round(x2 * per_unit)), vec4<i32>(round(x3 * per_unit)),
    ) + digits(
        at, 1u, vec4<i32>(round(x4 * per_unit)), vec4<i32>(round(x5 * per_unit)),
        vec4<i32>(round(x6 * per_unit)), vec4<i32>(round(x7 * per_unit)),
    );
    // Infinity or NaN in x makes every sum over its block NaN.
    let shown = select(bitcast<u32>(unit), 0x7FC00000u, top >= 0x7F800000u);
    x_tile[at + 6u] = vec4<u32>(shown, bitcast<vec3<u32>>(sums * ZERO_POINT));
}

fn bytes_dot(a: vec4<u32>, b: vec4<u32>) -> i32 {
    return dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}

struct Digits {
    h0: vec4<u32>, h1: vec4<u32>, m0: vec4<u32>, m1: vec4<u32>, l0: vec4<u32>, l1: vec4<u32>,
    zero: vec3<i32>,  // what the zero point of the weights adds to each sum
    unit: f32,
}

fn fixed_dot(p: Packed, v: Digits) -> f32 {
    let q = packed_bytes(p);
    let h = bytes_dot(q.a, v.h0) + bytes_dot(q.b, v.h1) - v.zero.x;
    let m = bytes_dot(q.a, v.m0) + bytes_dot(q.b, v.m1) - v.zero.y;
    let l = bytes_dot(q.a, v.l0) + bytes_dot(q.b, v.l1) - v.zero.z;
    return (f32(h) * 65536.0 + (f32(m) * 256.0 + f32(l))) * (p.scale * v.unit);
}

fn store(row: u32, value: f32) {
    if (row < params.n) {
        var total = value;
        if (HAS_BIAS) {
            total = total + bias[row];
        }
        out[params.n_first + row] = total;
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let first = ((group.x + group.y * groups.x) * (WG / TEAM) + lane / TEAM) * ROWS;
    let last = params.n - 1u;  // rows past the end are computed as the last one and never stored
    let rows = min(vec4<u32>(first, first + 1u, first + 2u, first + 3u), vec4<u32>(last));
    let blocks = params.k / 32u;
    var acc = vec4<f32>();
    var block = lane % TEAM;
    let last_block = blocks - 1u;
    // A load past the end repeats the last block and is not used.
    var w0 = load_block(rows.x, min(block, last_block));
    var w1 = w0;
    var w2 = w0;
    var w3 = w0;
    if (ROWS > 1u) {
        w1 = load_block(rows.y, min(block, last_block));
    }
    if (ROWS > 2u) {
        w2 = load_block(rows.z, min(block, last_block));
        w3 = load_block(rows.w, min(block, last_block));
    }
    for (var first_block = 0u; first_block < blocks; first_block = first_block + STAGE) {
        let end = min(first_block + STAGE, blocks);
        workgroupBarrier();  // the stage before has been read
        for (var i = lane; i < (end - first_block) * 8u; i = i + WG) {
            x_tile[i / 8u * 9u + i % 8u] = bitcast<vec4<u32>>(x[first_block * 8u + i]);
        }
        workgroupBarrier();
        for (var b = lane; b < end - first_block; b = b + WG) {
            fix_block(b * 9u);
        }
        workgroupBarrier();
        for (; block < end; block = block + TEAM) {
            let p0 = w0;
            let p1 = w1;
            let p2 = w2;
            let p3 = w3;
            let ahead = min(block + TEAM, last_block);
            w0 = load_block(rows.x, ahead);
            if (ROWS > 1u) {
                w1 = load_block(rows.y, ahead);
            }
            if (ROWS > 2u) {
                w2 = load_block(rows.z, ahead);
                w3 = load_block(rows.w, ahead);
            }
            let i = (block - first_block) * 9u;
            let tail = x_tile[i + 6u];
            let v = Digits(
                x_tile[i], x_tile[i + 1u], x_tile[i + 2u], x_tile[i + 3u], x_tile[i + 4u], x_tile[i + 5u],
                bitcast<vec3<i32>>(tail.yzw), bitcast<f32>(tail.x),
            );
            acc.x = acc.x + fixed_dot(p0, v);
            if (ROWS > 1u) {
                acc.y = acc.y + fixed_dot(p1, v);
            }
            if (ROWS > 2u) {
                acc.z = acc.z + fixed_dot(p2, v);
                acc.w = acc.w + fixed_dot(p3, v);
            }
        }
    }
    acc = team_sum(acc, lane);
    if (lane % TEAM == 0u) {
        store(first, acc.x);
        if (ROWS > 1u) {
            store(first + 1u, acc.y);
        }
        if (ROWS > 2u) {
            store(first + 2u, acc.z);
            store(first + 3u, acc.w);
        }
    }
}
