"""The other hook into Transformers: attention that runs, over the paged cache, for a model that is not compiled.

Like attention_hook.py, but every call does its work at once, through the op that the compiled program calls. The order
of the calls gives the layer, as it gave the names in the program.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from mllm_compile.runtime.forward_context import get_forward_context
from mllm_compile.runtime.ops.attention.layer_op import attention_with_output

EAGER_IMPLEMENTATION = "mllm_eager"
LAYER_NAMES = "eager_layer_names"  # in the forward context's additional_kwargs: an iterator, a name for each call


def eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Transformers calls it: query [1, H, T, D], key [1, Hk, T, D], value [1, Hk, T, Dv].

    Window, cap and sinks are the layer's: the check of the trace has seen that they are what the model asks for. So is
    the scale, but for a factor of queries that a pass has made part of it (passes/match/query_factor.py).

    Returns:
        [1, T, H, Dv], and no attention weights.
    """
    context = get_forward_context()
    layer_name = next(context.additional_kwargs[LAYER_NAMES])
    layer = context.no_compile_layers[layer_name]
    asked = query.shape[3] ** -0.5 if scaling is None else scaling
    if asked != layer.sm_scale:
        query = query * (asked / layer.sm_scale)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    width, v_width = layer.head_dim - q.shape[2], layer.v_head_dim - v.shape[2]  # what a pass has padded them by
    q, k, v = F.pad(q, (0, width)), F.pad(k, (0, width)), F.pad(v, (0, v_width))
    out = q.new_empty(*q.shape[:2], v.shape[2])
    attention_with_output(q, k, v, out, layer_name)
    # In one stretch, as Transformers' own: some models take heads together by a view.
    return out[None, :, :, : value.shape[3]].contiguous(), None


def register_eager_attention() -> None:
    """Makes `attn_implementation="mllm_eager"` known to Transformers; calling it again changes nothing."""
    AttentionInterface.register(EAGER_IMPLEMENTATION, eager_attention)
