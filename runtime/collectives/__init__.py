"""Calls that ranks make together: sums, gathers and broadcasts of tensors, over gloo on a CPU and NCCL on GPUs."""
