"""Sees the choice of experts behind a router: counts each (`runtime.expert_stats`), and keeps them by slot of the KV
cache (`runtime.routed_experts`).

Reads from the forward context whose turn it is among the layers of experts (all_moe_layers, moe_layer_index), and where
that layer's counts are. A captured graph keeps the counts that its layer had at the capture. Defined with
torch.library's define/impl because calling a `torch.library.custom_op` imports Dynamo and Inductor.

Shape legend: T tokens, k experts a token, E experts.
"""

from __future__ import annotations

import torch

from mllm_compile.runtime.forward_context import get_forward_context

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("count_experts(Tensor ids, Tensor slots) -> Tensor")


def count_experts(ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Adds one to the count of each expert that a token chose, keeps its choice, and gives the ids on.

    Args:
        ids: [T, k] int64; one that is no expert's is not counted.
        slots: [T] int64, a token's slot of the KV cache: 0 is padding, which is not counted.

    Returns:
        ids, as a tensor of its own.
    """
    context = get_forward_context()
    layer = context.next_moe_layer()
    if layer is not None and context.expert_routes is not None:
        context.expert_routes.keep(layer, ids, slots)
    if layer is not None and context.expert_counts is not None:
        counts = context.expert_counts[layer]
        num_experts = counts.shape[0]
        is_counted = (slots > 0)[:, None] & (ids >= 0) & (ids < num_experts)
        counts.index_add_(0, ids.clamp(0, num_experts - 1).flatten(), is_counted.flatten().to(counts.dtype))
    return ids.clone()


_LIBRARY.impl("count_experts", count_experts, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::count_experts", lambda ids, slots: torch.empty_like(ids), lib=_LIBRARY)
