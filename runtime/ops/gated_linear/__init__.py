"""silu(x · gateᵀ) · (x · upᵀ) for many tokens on Hopper, as one CUDA kernel: a matrix product whose sums are activated
before they leave the registers."""
