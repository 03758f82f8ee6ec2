"""Weights of linears in few bits, as they are in memory: the scheme, and its numbers in plain torch."""
