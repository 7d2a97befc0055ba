"""Architectures of language models: metadata → config → graph."""
