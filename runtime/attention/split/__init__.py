"""Decode attention by the program's own kernels, which split a request's keys."""
