"""The hook into attention of towers that take whole images, under masks that they make of what is filled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

import mllm_compile.runtime.ops.segments.masked  # noqa: F401  (defines torch.ops.mllm.masked_attention)
from mllm_compile.model.towers.segments_hook import attending_by

_IMPLEMENTATION = "mllm_masked"
_WITHOUT_EFFECT = frozenset({"is_causal", "return_dict", "output_attentions", "output_hidden_states"})


@contextmanager
def attending_by_masks(tower: Any) -> Iterator[None]:
    """Within the context the tower attends by mllm::masked_attention. It has as many key heads as query heads."""
    AttentionInterface.register(_IMPLEMENTATION, _masked_attention)
    with attending_by(tower, _IMPLEMENTATION):
        yield


def _masked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Transformers' towers call it: query [B, H, N, D], key [B, H, M, D], value [B, H, M, Dv].

    Raises:
        ValueError: it is called with more, which ends the trace with that reason.
    """
    unknown = sorted(name for name, one in kwargs.items() if one is not None and name not in _WITHOUT_EFFECT)
    unknown += ["is_causal"] if kwargs.get("is_causal") else []
    if unknown or dropout or query.shape[1] != key.shape[1]:
        raise ValueError(f"the tower's attention passes {', '.join(unknown) or 'dropout, or shares key heads'}")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    return torch.ops.mllm.masked_attention(query, key, value, attention_mask, scale), None
