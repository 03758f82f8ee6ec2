"""Linears on a CPU by our own C++: weights lie in memory in panels of 16 rows."""
