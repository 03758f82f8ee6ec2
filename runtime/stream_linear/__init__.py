"""Linears of steps of up to 256 tokens on Hopper: three CUDA kernels, which take the norm before a linear and what
follows it along. rows.cu computes those of large weights for up to 8 tokens, tiles.cu any of up to 128, wide.cu those
of more. A runtime holds one compiled for each of its model's linears and bucket of tokens."""
