"""Decode attention on Hopper: CUDA kernels for few requests (clusters.cu) and many (shares.cu), and their launches."""
