"""Linears of steps of up to 192 tokens on Hopper: two CUDA kernels, which take the norm before a linear and what
follows it along. tiles.cu computes any of them, rows.cu those of large weights for up to 8 tokens. A runtime holds one
compiled for each of its model's linears and bucket of tokens."""
