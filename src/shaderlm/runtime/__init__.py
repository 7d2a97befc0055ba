"""Models on a device: weights, caches, and conversations with them."""
