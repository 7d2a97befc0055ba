// KV cache format f16: four values of a head in two u32. Packing is core WGSL: no f16 feature needed.
// Exports: alias cache_quad, cache_load(quad), cache_pack(values); for half a quad cache_pair, cache_pack_pair(values).

alias cache_quad = vec2<u32>;

fn cache_load(quad: cache_quad) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(quad.x), unpack2x16float(quad.y));
}

fn cache_pack(values: vec4<f32>) -> cache_quad {
    return vec2<u32>(pack2x16float(values.xy), pack2x16float(values.zw));
}

alias cache_pair = u32;

fn cache_pack_pair(values: vec2<f32>) -> cache_pair {
    return pack2x16float(values);
}
