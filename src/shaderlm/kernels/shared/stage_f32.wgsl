// Staged inputs as they are: f32 arithmetic, for every weight format.
// Exports: FINISH, finish_block(at), staged(at), staged_dot(weights, inputs). Needs: x_tile, and packed_dot of the
// weight's format.

const FINISH: bool = false;

fn finish_block(at: u32) {
}

struct Staged {
    x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>,
    x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32>,
}

fn staged(at: u32) -> Staged {
    return Staged(
        bitcast<vec4<f32>>(x_tile[at]), bitcast<vec4<f32>>(x_tile[at + 1u]),
        bitcast<vec4<f32>>(x_tile[at + 2u]), bitcast<vec4<f32>>(x_tile[at + 3u]),
        bitcast<vec4<f32>>(x_tile[at + 4u]), bitcast<vec4<f32>>(x_tile[at + 5u]),
        bitcast<vec4<f32>>(x_tile[at + 6u]), bitcast<vec4<f32>>(x_tile[at + 7u]),
    );
}

fn staged_dot(p: Packed, v: Staged) -> f32 {
    return packed_dot(p, v.x0, v.x1, v.x2, v.x3, v.x4, v.x5, v.x6, v.x7);
}
