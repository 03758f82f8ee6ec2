"""Attention: the op between pieces, and the Triton kernels of each kind."""
