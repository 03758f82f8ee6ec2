"""Attention over latents by the program's own kernels."""
