"""Measures kernels: what is compared, how it is timed, how it is told."""
