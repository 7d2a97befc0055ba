// Factors of the gated delta rule. Exports: NORM_EPS, of the lengths of queries and keys; decay_of(alpha, rate, shift), what
// a state is multiplied with; sigmoid(v).

const NORM_EPS: f32 = 1e-6;

fn decay_of(alpha: f32, rate: f32, shift: f32) -> f32 {
    let v = alpha + shift;
    return exp(rate * select(log(1.0 + exp(min(v, 20.0))), v, v > 20.0));
}

fn sigmoid(v: f32) -> f32 {
    return select(1.0 / (1.0 + exp(-max(v, -88.0))), 0.0, v < -88.0);
}
