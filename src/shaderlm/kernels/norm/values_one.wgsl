// A step of a norm has one value. Exports: VALUES, total(v). Same as values_four.

const VALUES: u32 = 1u;

fn total(v: f32) -> f32 {
    return v;
}
