"""The hook into Transformers: an attention implementation called "mllm" that emits one opaque op on flat tokens.

Registered through Transformers' own AttentionInterface, so no model is changed. No mask function is registered under
the name, hence Transformers builds no mask: the op does causality and windows. Arguments of a call that the op
cannot express are written into its `refusals`, where mllm_compile/model/supported.py reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

import mllm_compile.runtime.ops.trace  # noqa: F401  (defines torch.ops.mllm.attention)
from mllm_compile.model.refusals import refusing
from mllm_compile.model.written_attention.indexed import EVERY_KEY, EveryKey

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_IMPLEMENTATION = "mllm"

# Said by every model to every implementation, without changing what attention computes for packed causal tokens.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
        "deterministic",
        "target_dtype",
        "implementation",
        "layer_idx",
        "num_items_in_batch",
    }
)


def mllm_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | EveryKey | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    distance_bias: torch.Tensor | None = None,
    indices: torch.Tensor | EveryKey | None = None,
    block_indices: torch.Tensor | EveryKey | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Transformers calls it: query [1, H, T, D], key [1, Hk, T, D], value [1, Hk, T, Dv].

    Args:
        distance_bias: [H, 2R + 1], as the op takes it; from our own hooks.
        indices, block_indices: what an indexer chooses for each token (written_attention/).

    Returns:
        [1, T, H, Dv], and no attention weights.
    """
    refusals = [
        f"keyword {name}" for name in sorted(kwargs) if kwargs[name] is not None and name not in _WITHOUT_EFFECT
    ]
    if attention_mask is not None and attention_mask is not EVERY_KEY:
        refusals.append("an attention mask")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        refusals.append("attention that is not causal")
    if dropout:
        refusals.append("dropout")
    # Two names of one symbol compare without a branch on its value; of two symbols that may differ, none can be served.
    if key.shape[2] is not query.shape[2] and key.shape[2] != query.shape[2]:
        refusals.append("keys that are not the tokens' own")
    chosen = [one for one in (indices, block_indices) if isinstance(one, torch.Tensor)] or None
    _, num_heads, num_tokens, head_dim = query.shape
    flat_query = query.transpose(1, 2).reshape(num_tokens, num_heads, head_dim).contiguous()
    flat_key = key.transpose(1, 2).reshape(num_tokens, key.shape[1], head_dim)
    flat_value = value.transpose(1, 2).reshape(num_tokens, value.shape[1], value.shape[3])
    output = torch.ops.mllm.attention(
        flat_query,
        flat_key,
        flat_value,
        s_aux,
        float(head_dim**-0.5 if scaling is None else scaling),
        float(softcap or 0.0),
        -1 if sliding_window is None else sliding_window - 1,
        "; ".join(refusals),
        *(() if distance_bias is None and chosen is None else (None, 0, 0, None, distance_bias)),
        *(() if chosen is None else (chosen,)),
    )
    return output.unsqueeze(0), None


def register_attention_hook() -> None:
    """Makes `attn_implementation="mllm"` known to Transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_IMPLEMENTATION, mllm_attention)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The attention implementation `name` within the context.

    A model that does not follow Transformers' attention interface keeps its own, and gets the masks of `name`.

    Raises:
        UnsupportedModelError: the model does not take it.
    """
    before = str(model.config._attn_implementation)
    with refusing(f"{model.config.model_type!r} models do not take attention implementation {name!r}"):
        _choose(model, name)
    try:
        yield
    finally:
        _choose(model, before)


def _choose(model: PreTrainedModel, name: str) -> None:
    if model._can_set_attn_implementation():  # if not, set_attn_implementation does nothing but warn
        model.set_attn_implementation(name)
        # Up to Transformers 5.17 copies of the model's config, which parts of T5 have, stay as they are.
        configs = (getattr(part, "config", None) for part in model.modules())
        for config in configs:
            if type(config) is type(model.config):
                config._attn_implementation_internal = name
    else:
        model.config._attn_implementation = name
