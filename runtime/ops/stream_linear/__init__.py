"""Linears of steps of up to 256 tokens on Hopper: four CUDA kernels, which take the norm before a linear and what
follows it along. For up to 8 tokens lanes.cu computes small weights and rows.cu large ones; tiles.cu takes up to 128
tokens, wide.cu more. A runtime holds one compiled for each of its model's linears and bucket of tokens."""
