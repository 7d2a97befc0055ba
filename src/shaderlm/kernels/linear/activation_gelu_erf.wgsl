// The functions of an epilogue with gelu_erf. Exports: plain(y), gate(y). Same functions as activation_silu. Needs: shared/gelu_erf.

alias value = f32;

fn plain(y: f32) -> f32 {
    return gelu_erf(y);
}

fn gate(y: f32) -> f32 {
    return gelu_erf(y);
}
