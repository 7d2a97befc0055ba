// softcap(x, cap) = cap · tanh(x / cap)
// WGSL's tanh may be wrong by 1e-5, which is too much times cap. tanh(x) = 1 − 2 / (exp(2 x) + 1), of which exp must not
// overflow. NaN stays NaN. Exports: softcap(x, cap). Needs: alias value, f32 or vec4<f32>.

fn softcap(x: value, cap: f32) -> value {
    let y = x / cap;
    let bounded = select(y, value(15.0), y > value(15.0));
    return cap * (value(1.0) - value(2.0) / (exp(bounded + bounded) + value(1.0)));
}
