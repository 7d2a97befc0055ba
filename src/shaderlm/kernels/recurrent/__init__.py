"""Kernels of layers that keep a state for each sequence."""
