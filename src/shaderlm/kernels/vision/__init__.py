"""Images: what makes patches of pixels and features of patches, and what a step does with features."""
