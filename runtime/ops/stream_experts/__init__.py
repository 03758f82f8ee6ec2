"""Mixtures of experts with up to 8 tokens on Hopper, in two CUDA kernels: gate_up with its activation, and down with
the weighted sum, the residual and the next norm's inputs.

choice.cuh is how both find out which experts a step's tokens go to, from the router's scores; shapes.py says what they
take, kernel.py how they are laid out.
"""
