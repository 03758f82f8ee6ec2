"""Counts the experts whose weights a step reads."""

from __future__ import annotations


def active_experts(num_experts: int, num_chosen: int, num_tokens: int) -> float:
    """The expected number of different experts that tokens choose, each by itself and all alike likely.

    A trained router prefers some experts, so that fewer are active.
    """
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens)
