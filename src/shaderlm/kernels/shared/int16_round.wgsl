// Rounds blocks of 32 values to 16 bits with one unit each, to at most 1/65,024 of their largest, as bytes for shared/int16.
// Exports: Quarter, round_quarter(values, values, quarter).

// A number that is added before rounding leaves the nearest integer in the last bits of the sum, two's complement and
// all. Converting takes a GPU four times as long. (1.5 · 2^23; the integers are below 2^22.)
const ROUNDER: f32 = 12582912.0;
const EIGHT_ROUNDERS: u32 = 0x5A000000u;  // the bits of eight of them, modulo 2^32

fn magnitude(v: vec4<f32>) -> vec4<u32> {
    return bitcast<vec4<u32>>(v) & vec4<u32>(0x7FFFFFFFu);
}

// The lowest bytes of four words.
fn low_bytes(v: vec4<u32>) -> u32 {
    let bytes = v & vec4<u32>(0xFFu);
    return bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
}

// v = 256 · h + l with l from −128 to 127: l is v's last byte as it is, h the one before it once 128 is added.
fn h_bytes(v: vec4<u32>) -> u32 {
    return low_bytes((v + vec4<u32>(128u)) >> vec4<u32>(8u));
}

struct Quarter {
    bytes: vec4<u32>,  // lanes 0 … 3: h of the first sixteen, l of these, h of the others, l of these
    unit: vec3<f32>,   // (unit, unit · Σ of the own half of the block, unit · Σ of the other half)
}

// Four neighbouring lanes of a subgroup round a block, eight values each. All lanes are here.
fn round_quarter(v0: vec4<f32>, v1: vec4<f32>, quarter: u32) -> Quarter {
    // The largest magnitude, compared as bits: their order is that of the numbers, with NaN above all.
    let most = max(magnitude(v0), magnitude(v1));
    var top = max(max(most.x, most.y), max(most.z, most.w));
    top = max(top, subgroupShuffleXor(top, 1u));
    top = max(top, subgroupShuffleXor(top, 2u));
    let unit = bitcast<f32>(top) * (1.0 / 32512.0);  // 127 · 256
    let per_unit = select(1.0 / unit, 0.0, top < 0x0DA24260u);  // below 1e-30 a block counts as zeros
    let a = bitcast<vec4<u32>>(fma(v0, vec4<f32>(per_unit), vec4<f32>(ROUNDER)));
    let b = bitcast<vec4<u32>>(fma(v1, vec4<f32>(per_unit), vec4<f32>(ROUNDER)));
    let both = a + b;
    var sum = bitcast<i32>(both.x + both.y + both.z + both.w - EIGHT_ROUNDERS);
    sum = sum + subgroupShuffleXor(sum, 1u);
    let other = subgroupShuffleXor(sum, 2u);
    // Infinity or NaN in x makes every sum over its block NaN.
    let shown = bitcast<f32>(select(bitcast<u32>(unit), 0x7FC00000u, top >= 0x7F800000u));
    // Neighbours swap halves, so that each writes a whole vector: WGSL lets a write to a part of one write all of it.
    let h = vec2<u32>(h_bytes(a), h_bytes(b));
    let l = vec2<u32>(low_bytes(a), low_bytes(b));
    let odd = quarter % 2u == 1u;
    let sent = select(l, h, odd);
    let got = vec2<u32>(subgroupShuffleXor(sent.x, 1u), subgroupShuffleXor(sent.y, 1u));
    let bytes = select(vec4<u32>(h, got), vec4<u32>(got, l), odd);
    return Quarter(bytes, vec3<f32>(shown, shown * f32(sum), shown * f32(other)));
}
