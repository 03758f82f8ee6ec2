"""Linears of fp8 and of four-bit weights and few tokens on Hopper, as `stream_linear` has them for bfloat16: few.cu is
for up to 16 tokens, tiles.cu for up to 128."""
