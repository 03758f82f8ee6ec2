"""Weights from a trainer's process, over groups that both join."""
