"""Attention over a KV cache."""
