"""The hook into a tower's attention: one op over packed patches, with the bounds of what attends to each other.

Transformers gives bounds (`cu_seq_lens_q`) to implementations alone whose name has "flash" in it; for others it splits
patches by their values. So our implementation has such a name for towers that pack. Those that take whole images are
given none, and a mask under such a name: theirs is another, and say_bounds says the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

import mllm_compile.runtime.ops.segments.reference  # noqa: F401  (defines torch.ops.mllm.segment_attention)

PACKED_IMPLEMENTATION = "mllm_flash_packed"
IMAGES_IMPLEMENTATION = "mllm_images"
_WITHOUT_EFFECT = frozenset(
    {"cu_seq_lens_k", "max_length_q", "max_length_k", "return_dict", "output_attentions", "output_hidden_states"}
)


class _Bounds:
    """The bounds of the call that is traced, where the tower is given none."""

    said: torch.Tensor | None = None


_BOUNDS = _Bounds()


def say_bounds(cu_seqlens: torch.Tensor | None) -> None:
    """Bounds for attentions that come; called within a trace."""
    _BOUNDS.said = cu_seqlens


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
    """Attention as Transformers' towers call it: query [B, H, N, D], key [B, Hk, N, D], value [B, Hk, N, Dv]; B is 1
    where patches are packed.

    Returns:
        [B, N, H, Dv], and no attention weights.
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
    cu_seq_lens_q = cu_seq_lens_q if _BOUNDS.said is None else _BOUNDS.said
    if cu_seq_lens_q is None:
        refusals.append("no bounds of images")
        cu_seq_lens_q = torch.zeros(2, dtype=torch.int32, device=query.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # parts of wider rows may stay such
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    out = torch.ops.mllm.segment_attention(q, k, v, cu_seq_lens_q, scale, "; ".join(refusals))
    return out.view(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


@contextmanager
def packed(tower: Any, implementation: str = PACKED_IMPLEMENTATION) -> Iterator[None]:
    """Within the context the tower attends by the op."""
    AttentionInterface.register(implementation, packed_attention)
    with attending_by(tower, implementation):
        yield


def said_bounds() -> torch.Tensor | None:
    """The bounds that say_bounds has said."""
    return _BOUNDS.said


@contextmanager
def attending_by(model: Any, implementation: str) -> Iterator[None]:
    """Within the context all modules of `model` attend by an implementation that is registered."""
    of_modules = (module.config for module in model.modules() if hasattr(module, "config"))
    configs = list({id(config): config for config in of_modules}.values())
    # set_attn_implementation would look for a kernel of this name on the hub.
    before = [getattr(config, "_attn_implementation_internal", None) for config in configs]
    for config in configs:
        config._attn_implementation_internal = implementation
    try:
        yield
    finally:
        say_bounds(None)
        for config, one in zip(configs, before, strict=True):
            config._attn_implementation_internal = one
