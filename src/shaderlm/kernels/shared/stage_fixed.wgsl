// Staged inputs in 24-bit fixed point, for weights that are integers: v = 65536·h + 256·m + l with signed bytes h, m,
// l and one scale per block of 32. Products are then integer dot products of bytes, exact, four at a time, and cost
// less than unpacking weights to f32. Each x is rounded by at most 1/16,646,144 of the largest of its block, which is
// what f32 arithmetic does to a sum that holds that one.
// Exports: FINISH, finish_block(at), staged(at), staged_dot(weights, inputs). Needs: x_tile, and packed_bytes and
// ZERO_POINT of the weight's format. A finished block holds h in quads 0 and 1, m in 2 and 3, l in 4 and 5, and
// (scale, Σ h, Σ m, Σ l) in 6, the sums times the zero point.

const FINISH: bool = true;

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

fn finish_block(at: u32) {
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

struct Staged {
    h0: vec4<u32>, h1: vec4<u32>, m0: vec4<u32>, m1: vec4<u32>, l0: vec4<u32>, l1: vec4<u32>,
    zero: vec3<i32>,  // what the zero point of the weights adds to each sum
    unit: f32,
}

fn staged(at: u32) -> Staged {
    let tail = x_tile[at + 6u];
    return Staged(
        x_tile[at], x_tile[at + 1u], x_tile[at + 2u], x_tile[at + 3u], x_tile[at + 4u], x_tile[at + 5u],
        bitcast<vec3<i32>>(tail.yzw), bitcast<f32>(tail.x),
    );
}

fn staged_dot(p: Packed, v: Staged) -> f32 {
    let q = packed_bytes(p);
    let h = bytes_dot(q.a, v.h0) + bytes_dot(q.b, v.h1) - v.zero.x;
    let m = bytes_dot(q.a, v.m0) + bytes_dot(q.b, v.m1) - v.zero.y;
    let l = bytes_dot(q.a, v.l0) + bytes_dot(q.b, v.l1) - v.zero.z;
    return (f32(h) * 65536.0 + (f32(m) * 256.0 + f32(l))) * (p.scale * v.unit);
}
