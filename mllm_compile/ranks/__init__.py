"""Ranks of one model: the processes that follow the engine's, how they start, and what becomes of all when one ends."""
