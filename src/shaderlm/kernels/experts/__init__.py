"""Kernels of mixtures of experts: choosing, products, the gate of a shared network."""
