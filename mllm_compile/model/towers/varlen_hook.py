"""The hook into a tower's attention: one op over packed patches, with the bounds of what attends to each other.

Transformers gives bounds (`cu_seq_lens_q`) to implementations alone whose name has "flash" in it; for others it splits
patches by their values. So our implementation has such a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

import mllm_compile.runtime.ops.varlen.ops  # noqa: F401  (defines torch.ops.mllm.varlen_attention)

PACKED_IMPLEMENTATION = "mllm_flash_packed"
_WITHOUT_EFFECT = frozenset({"cu_seq_lens_k", "max_length_q", "max_length_k", "return_dict", "output_attentions"})


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Transformers' towers call it: query [1, H, N, D], key [1, Hk, N, D], value [1, Hk, N, Dv].

    Returns:
        [1, N, H, Dv], and no attention weights.
    """
    refusals = [
        f"keyword {name}" for name in sorted(kwargs) if kwargs[name] is not None and name not in _WITHOUT_EFFECT
    ]
    if attention_mask is not None:
        refusals.append("an attention mask")
    if is_causal:
        refusals.append("attention that is causal")
    if dropout:
        refusals.append("dropout")
    if cu_seq_lens_q is None:
        refusals.append("no bounds of images")
        cu_seq_lens_q = torch.zeros(2, dtype=torch.int32, device=query.device)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    return torch.ops.mllm.varlen_attention(q, k, v, cu_seq_lens_q, scale, "; ".join(refusals))[None], None


@contextmanager
def packed(tower: Any) -> Iterator[None]:
    """Within the context the tower attends by the op."""
    AttentionInterface.register(PACKED_IMPLEMENTATION, packed_attention)
    config = tower.config
    # set_attn_implementation would look for a kernel of this name on the hub.
    before = config._attn_implementation_internal
    config._attn_implementation_internal = PACKED_IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation_internal = before
