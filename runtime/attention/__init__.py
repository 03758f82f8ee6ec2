"""Attention over the paged KV cache: base.py has the contract, one backend a file beside it."""
