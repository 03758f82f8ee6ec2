"""Linears of experts with many rows each, on Hopper's tensor cores: kernels that NVRTC compiles, and the ops that call
them."""
