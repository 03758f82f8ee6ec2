"""Linears of fp8 weights and few tokens on Hopper, which do what those of `stream_linear` do: few.cu is for up to 8
tokens."""
