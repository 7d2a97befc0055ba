// Values as f16, two to a u32, eight to a vec4<u32>. Of each four, the first and the third are one pair, the second and
// the fourth the other: so nibbles and bytes of a word are pairs after a mask, with no shuffle. A sum over k takes any
// order, if both operands have it.
// Files of formats (dequant_f16_FORMAT) export Raw; fetch(row, block), the 32 weights from k = 32·block as they lie; and
// eight_halves(raw, row, block, part), weights 8·part … 8·part + 7 of them. What was fetched is not looked at before it is
// needed: the kernel fetches it steps ahead.
// Exports: quad_halves(values), half_twice(value), one_half_twice(pair, which), HALF_1024.

fn quad_halves(values: vec4<f32>) -> vec2<u32> {
    return vec2<u32>(pack2x16float(values.xz), pack2x16float(values.yw));
}

fn half_twice(value: f32) -> u32 {
    return pack2x16float(vec2<f32>(value, value));
}

// One of a pair, without conversions: with them, a product of 16 rows took 5 % longer (H200).
fn one_half_twice(pair: u32, which: u32) -> u32 {
    return ((pair >> (16u * which)) & 0xFFFFu) * 0x10001u;
}

// As mantissa of an f16 from 1024 to 2047, the low ten bits of a half are a whole number: exact, without a conversion.
const HALF_1024: u32 = 0x64006400u;
