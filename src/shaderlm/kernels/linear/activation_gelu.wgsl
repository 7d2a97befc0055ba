// The functions of an epilogue with gelu. Exports: plain(y), gate(y). Same functions as activation_silu. Needs: shared/gelu.

alias value = f32;

fn plain(y: f32) -> f32 {
    return gelu(y);
}

fn gate(y: f32) -> f32 {
    return gelu(y);
}
