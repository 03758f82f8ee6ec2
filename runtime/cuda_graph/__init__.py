"""CUDA graphs over padded batch shapes."""
