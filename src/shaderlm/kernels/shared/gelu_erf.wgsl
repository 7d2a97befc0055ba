// gelu_erf(x) = x / 2 · (1 + erf(x / √2)) = x · (1 − erfc(|x| / √2) / 2) for x ≥ 0, x · erfc(|x| / √2) / 2 else
// erfc(z) = t · exp(−z² + a polynomial of t), t = 1 / (1 + z / 2): a Chebyshev fit whose relative error is 1.2e-7 for all z.
// NaN stays NaN. Exports: gelu_erf(x). Needs: alias value, f32 or vec4<f32>.

fn gelu_erf(x: value) -> value {
    let z = min(abs(x) * 0.70710678, value(20.0));  // erfc is 0 to f32's precision from 11 on
    let t = value(1.0) / (value(1.0) + 0.5 * z);
    var sum = value(0.17087277);
    sum = sum * t - value(0.82215223);
    sum = sum * t + value(1.48851587);
    sum = sum * t - value(1.13520398);
    sum = sum * t + value(0.27886807);
    sum = sum * t - value(0.18628806);
    sum = sum * t + value(0.09678418);
    sum = sum * t + value(0.37409196);
    sum = sum * t + value(1.00002368);
    sum = sum * t - value(1.26551223);
    let half = 0.5 * t * exp(max(sum - z * z, value(-88.0)));
    return x * select(half, value(1.0) - half, x >= value(0.0));
}
