"""Replies that are known beforehand, for benchmarks of drafts by text."""
