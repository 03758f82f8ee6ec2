"""Ops that a graph may hold, a file or folder each."""
