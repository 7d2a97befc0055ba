// Prologue of a product of what skip_rms_norm gives, as it is.
// Exports: NORM, load_weights(quad), load_more_weights(quad), weighted(quad, value), factor(squares). Same names as
// prologue_rms_norm_early.

const NORM: bool = false;

fn load_weights(at: u32) {
}

fn load_more_weights(at: u32) {
}

fn weighted(quad: u32, value: vec4<f32>) -> vec4<f32> {
    return value;
}

fn factor(squares: f32) -> f32 {
    return 1.0;
}
