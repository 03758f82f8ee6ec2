"""Linears of steps of up to 256 tokens on Hopper: four CUDA kernels, which take the norm before a linear and what
follows it along. For up to 8 tokens lanes.cu computes those of small weights and rows.cu those of large ones, tiles.cu
any of up to 128, wide.cu those of more. A runtime holds one compiled for each of its model's linears and bucket of
tokens."""
