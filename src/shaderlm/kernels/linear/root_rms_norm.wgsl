// What sums are multiplied by after a prologue rms_norm: 1 / sqrt(mean(x²) + eps). `squares` is the share of a lane in Σ x².
// Exports: rooted(sums, squares, lane), which all lanes call. Needs: prologue_rms_norm and workgroup_sum.

fn rooted(sums: vec4<f32>, squares: f32, lane: u32) -> vec4<f32> {
    return sums * factor(workgroup_sum(squares, lane));
}
