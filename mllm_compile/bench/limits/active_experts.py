"""Counts the experts whose weights a step reads."""

from __future__ import annotations

from mllm_compile.runtime.program.spec import ExpertWeight


def active_experts(num_experts: int, num_chosen: int, num_tokens: int) -> float:
    """The expected number of different experts that tokens choose, each by itself and all alike likely.

    A trained router prefers some experts, so that fewer are active.
    """
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens)


def active_bytes(weight: ExpertWeight, num_tokens: int, num_bytes: int, share: float | None = None) -> float:
    """The bytes that a step of so many tokens reads of a weight of experts, which is `num_bytes` in all.

    Args:
        share: of the experts, as far as it was counted; None: the expected one.
    """
    if share is None:
        share = active_experts(weight.num_experts, weight.num_chosen, num_tokens) / weight.num_experts
    return share * num_bytes


def expert_flops(weight: ExpertWeight, num_tokens: int) -> int:
    """The operations of so many tokens' products with a weight of experts."""
    return 2 * num_tokens * weight.num_chosen * weight.inputs * weight.outputs
