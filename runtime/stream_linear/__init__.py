"""Linears of steps of few tokens on Hopper: one CUDA kernel (kernel.cu), which takes the norm before a linear and what
follows it along. A runtime holds it compiled for each of its model's linears."""
