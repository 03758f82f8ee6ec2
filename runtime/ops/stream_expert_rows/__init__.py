"""Linears of experts in MXFP4 with few rows each, on Hopper: a kernel that streams weights, and the op that calls
it."""
