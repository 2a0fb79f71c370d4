"""Decoders, their weight files and kernels."""
