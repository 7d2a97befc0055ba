// What linear_matrix_few does with four neighbouring sums: what its epilogue does or, if k is in parts, they are added up by
// linear_matrix_merge, and out is [split, tokens, 4 · ceil(n / 4)]. One kernel for both: GPUs fetch the code of each kernel
// of a layer anew if it is too much for their cache.
// Exports: finish_part(part, m, n, sums). Same function as part_whole. Needs: finish_store.

fn finish_part(part: u32, m: u32, n: u32, sums: vec4<f32>) {
    if (params.split == 1u) {
        finish(part, m, n, sums);
    } else if (m < row_count() && n < params.n) {
        let at = (part * params.tokens + m) * ((params.n + 3u) / 4u * 4u) + n;
        out[at] = sums.x;
        out[at + 1u] = sums.y;
        out[at + 2u] = sums.z;
        out[at + 3u] = sums.w;
    }
}
