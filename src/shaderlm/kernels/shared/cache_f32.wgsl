// KV cache format f32: four values of a head as vec4<f32>.
// Exports: alias cache_quad, cache_load(quad), cache_pack(values); for half a quad cache_pair, cache_pack_pair(values).

alias cache_quad = vec4<f32>;

fn cache_load(quad: cache_quad) -> vec4<f32> {
    return quad;
}

fn cache_pack(values: vec4<f32>) -> cache_quad {
    return values;
}

alias cache_pair = vec2<f32>;

fn cache_pack_pair(values: vec2<f32>) -> cache_pair {
    return values;
}
