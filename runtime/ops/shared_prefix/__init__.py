"""Attention of decodes that begin with the same pages, which are read once for all of them."""
