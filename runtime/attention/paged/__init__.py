"""Attention of a CPU over the pages, in C++."""
