"""Scripts that time single kernels and layers, most of them inside a CUDA graph."""
