"""Compares what was compiled with Transformers and torch before it is published."""
