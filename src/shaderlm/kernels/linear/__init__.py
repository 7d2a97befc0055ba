"""Matrix products with weights: q4gsw, and the formats of `formats`."""
