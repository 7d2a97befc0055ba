// Quads of a cache, one at a time. Needs: shared/cache_f16 or shared/cache_f32. Same as units_octets.
// Exports: UNIT, alias cache_unit, unit_quad(unit, i).

alias cache_unit = cache_quad;

const UNIT: u32 = 1u;  // quads

fn unit_quad(unit: cache_unit, i: u32) -> vec4<f32> {
    return cache_load(unit);
}
