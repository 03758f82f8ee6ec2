"""Linears of fp8 and of four-bit weights and few tokens on Hopper, which do what those of `stream_linear` do: few.cu is
for up to 16 tokens, tiles.cu for up to 128."""
