"""Layers that carry a state from token to token: what they are, where their states are, and what computes them."""
