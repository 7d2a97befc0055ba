// Which keys a row sees, and what becomes of its scores. Constants: without a window and a cap nothing is computed.
// Exports: WINDOW, SOFTCAP, first_key(last), capped(score), capped4(scores).

const WINDOW: u32 = 0u;    // keys that a row sees, its own included; 0: all
const SOFTCAP: f32 = 0.0;  // scores become SOFTCAP · tanh(score / SOFTCAP); 0: they stay

// The first key that a row sees whose last one is given.
fn first_key(last: u32) -> u32 {
    if (WINDOW == 0u) {
        return 0u;
    }
    return last + 1u - min(WINDOW, last + 1u);
}

// As in shared/softcap: WGSL's tanh is not exact enough. NaN stays NaN.
fn capped(score: f32) -> f32 {
    if (SOFTCAP == 0.0) {
        return score;
    }
    let y = score / SOFTCAP;
    return SOFTCAP * (1.0 - 2.0 / (exp(2.0 * select(y, 15.0, y > 15.0)) + 1.0));
}

fn capped4(scores: vec4<f32>) -> vec4<f32> {
    if (SOFTCAP == 0.0) {
        return scores;
    }
    return vec4<f32>(capped(scores.x), capped(scores.y), capped(scores.z), capped(scores.w));
}
