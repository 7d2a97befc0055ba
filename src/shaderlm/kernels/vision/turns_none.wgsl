// Heads as they are. Needs: x. Exports: turned_quad(base, quad, t). Same as turns_by_row.

fn turned_quad(base: u32, quad: u32, t: u32) -> vec4<f32> {
    return x[base + quad];
}
