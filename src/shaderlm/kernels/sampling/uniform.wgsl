// A random number in (0, 1) of a seed and a position alone: pcg4d (Jarzynski and Olano, 2020), integers only.
// An odd multiple of 2^−24, which f32 holds exactly. graph/sampling.py has the same in NumPy.

const STREAM: u32 = 0x73616d70u;

fn uniform_of(seed: vec2<u32>, position: u32) -> f32 {
    var v = vec4<u32>(seed, position, STREAM) * 1664525u + 1013904223u;
    v.x = v.x + v.y * v.w;
    v.y = v.y + v.z * v.x;
    v.z = v.z + v.x * v.y;
    v.w = v.w + v.y * v.z;
    v = v ^ (v >> vec4<u32>(16u));
    v.x = v.x + v.y * v.w;
    v.y = v.y + v.z * v.x;
    v.z = v.z + v.x * v.y;
    v.w = v.w + v.y * v.z;
    return (f32(v.x >> 9u) + 0.5) * 1.1920928955078125e-7;  // 2^−23
}
