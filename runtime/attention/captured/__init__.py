"""Attention in a captured CUDA graph."""
