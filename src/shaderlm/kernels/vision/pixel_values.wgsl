// Values of pixels: f32, or bytes, four in a word, the lowest first. Needs: x. Exports: pixel_value(i).

const BYTES: bool = false;

fn pixel_value(i: u32) -> f32 {
    let word = x[min(select(i, i / 4u, BYTES), arrayLength(&x) - 1u)];
    if (BYTES) {
        return f32((word >> (i % 4u * 8u)) & 255u);
    }
    return bitcast<f32>(word);
}
