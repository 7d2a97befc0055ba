"""Normalisation kernels: rms_norm and its fusions, layer_norm."""
