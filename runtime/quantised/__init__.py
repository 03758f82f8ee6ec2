"""Weights of linears in few bits, as they lie in memory: the scheme, and its numbers in plain torch."""
