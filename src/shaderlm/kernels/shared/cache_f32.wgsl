// KV cache format f32: four values of a head as vec4<f32>.
// Exports: alias cache_quad, cache_load(quad), cache_pack(values).

alias cache_quad = vec4<f32>;

fn cache_load(quad: cache_quad) -> vec4<f32> {
    return quad;
}

fn cache_pack(values: vec4<f32>) -> cache_quad {
    return values;
}
