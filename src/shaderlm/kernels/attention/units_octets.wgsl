// Quads of a cache of f16, two at a time: 16 bytes a lane. Same as units_quads.
// Exports: UNIT, alias cache_unit, unit_quad(unit, i).

alias cache_unit = vec4<u32>;

const UNIT: u32 = 2u;  // quads

fn unit_quad(unit: cache_unit, i: u32) -> vec4<f32> {
    let pair = select(unit.xy, unit.zw, i == 1u);
    return vec4<f32>(unpack2x16float(pair.x), unpack2x16float(pair.y));
}
