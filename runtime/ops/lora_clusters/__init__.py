"""Kernels of adapters for many tokens on Hopper, whose clusters have whole rows: A, and all that is between linears."""
