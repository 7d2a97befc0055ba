// Quads of heads of queries or keys, and of the weights of their norms. Exports: head_quad(queries, at), head_weight(queries, i).
// Needs: q, k, q_norm, k_norm.

fn head_quad(queries: bool, at: u32) -> vec4<f32> {
    if (queries) {
        return q[at];
    }
    return k[at];
}

fn head_weight(queries: bool, i: u32) -> vec4<f32> {
    if (queries) {
        return q_norm[i];
    }
    return k_norm[i];
}
