"""The hook into attention of a model that pools: one op over packed texts, with the bounds of each.

No mask function is registered under the name, so Transformers builds no mask. A call says whether it is causal and how
far it sees; what its mask says wins (windows.py), where the model asks for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from mllm_compile.model.pooling.disentangled import attending_disentangled
from mllm_compile.model.pooling.distance_bias import DistanceTables, distance_tables
from mllm_compile.model.pooling.own_attention import attending_past_the_interface
from mllm_compile.model.towers.segments_hook import attending_by, said_bounds, say_bounds
from mllm_compile.runtime.ops.segments.distance_scores import DistanceScores

TEXTS_IMPLEMENTATION = "mllm_texts"
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "deterministic",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "head_mask",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_ids",
        "return_dict",
        "target_dtype",
        "use_cache",
    }
)


class TextsAttention:
    """The implementation, for one trace.

    Args:
        tables: the bias of distances of the modules that attend by it.
    """

    def __init__(self, tables: DistanceTables) -> None:
        self._tables = tables

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        distances: DistanceScores | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention as Transformers calls it: query [1, H, T, D], key [1, Hk, T, D], value [1, Hk, T, Dv].

        Returns:
            [1, T, H, Dv], and no attention weights.
        """
        refusals = [f"keyword {name}" for name in sorted(kwargs) if _says(kwargs[name]) and name not in _WITHOUT_EFFECT]
        if attention_mask is not None:
            refusals.append("an attention mask")
        if dropout:
            refusals.append("dropout")
        if key.shape[2] is not query.shape[2] and key.shape[2] != query.shape[2]:
            refusals.append("keys that are not the tokens' own")
        bounds, bias = said_bounds(), None
        if bounds is None:
            refusals.append("no bounds of texts")
            bounds = torch.zeros(2, dtype=torch.int32, device=query.device)
        if position_bias is not None:
            bias = self._tables.of(module)
            if bias is None:
                refusals.append("a bias that is no table of distances")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        left = -1 if sliding_window is None else sliding_window - 1
        right = 0 if is_causal else left
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
        of_texts = left, right, bias, *(distances or (None, None, None)), s_aux, float(softcap or 0.0)
        out = torch.ops.mllm.segment_attention(q, k, v, bounds, scale, "; ".join(refusals), *of_texts)
        return out.view(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


@contextmanager
def attending_to_texts(model: Any) -> Iterator[None]:
    """Within the context the model attends by the op, within the bounds that say_bounds says."""
    attention = TextsAttention(distance_tables(model))
    AttentionInterface.register(TEXTS_IMPLEMENTATION, attention)
    try:
        past_it = attending_past_the_interface(model, attention), attending_disentangled(model, attention)
        with attending_by(model, TEXTS_IMPLEMENTATION), past_it[0], past_it[1]:
            yield
    finally:
        say_bounds(None)


def _says(value: Any) -> bool:
    """True unless an argument leaves attention as it is."""
    return value is not None and not (isinstance(value, bool | float) and not value)
