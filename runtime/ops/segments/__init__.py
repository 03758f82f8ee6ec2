"""Attention in both directions within segments of packed rows, as towers have it."""
