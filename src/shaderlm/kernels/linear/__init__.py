"""Matrix products with weights: q4gsw, and f32, f16, q8_0, q4_0."""
