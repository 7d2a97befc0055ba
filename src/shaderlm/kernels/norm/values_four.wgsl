// A step of a norm has four values. Exports: VALUES, total(v). Same as values_one.

const VALUES: u32 = 4u;

fn total(v: vec4<f32>) -> f32 {
    return (v.x + v.y) + (v.z + v.w);
}
