// The functions of an epilogue that multiplies silu(gate) by up, or has none. One file for both: most products of a model then
// have the same kernel. Exports: plain(y), gate(y). Same functions as activation_gelu. Needs: shared/silu.

fn plain(y: f32) -> f32 {
    return y;
}

fn gate(y: f32) -> f32 {
    return silu(y);
}
