"""Decode attention of few requests on Hopper: a CUDA kernel (decode.cu), which layers it serves, and its launch."""
