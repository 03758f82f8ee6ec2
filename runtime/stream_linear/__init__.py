"""Linears of steps of few tokens on Hopper: two CUDA kernels (tiles.cu, rows.cu), which take the norm before a linear
and what follows it along. A runtime holds one or the other compiled for each of its model's linears."""
