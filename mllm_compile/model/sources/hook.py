"""The hooks into attention of encoder-decoders, one a trace.

The decoder's trace has an op for each attention to the encoder's states, of queries alone: keys and values are in
pages. The source's trace keeps what the decoder would attend to, and computes nothing else of it.

Shape legend: T tokens, E tokens of sources, H heads, Hk heads of keys, D their width, Dv width of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

import mllm_compile.runtime.ops.trace  # noqa: F401  (defines torch.ops.mllm.cross_attention)
from mllm_compile.model.attention_hook import mllm_attention
from mllm_compile.model.pooling.distance_bias import DistanceTables, distance_tables
from mllm_compile.model.pooling.texts_hook import TextsAttention
from mllm_compile.model.sources.cross import CrossAttention
from mllm_compile.model.towers.segments_hook import attending_by, say_bounds

_DECODER = "mllm_decoder"
_SOURCE = "mllm_source"
_PART = "_mllm_part"  # of a decoder's module: "cross" or "decoder"
_MEANT_FOR_CACHES = frozenset({"cache_position", "past_key_values", "position_ids", "use_cache", "return_dict"})
_OUTPUTS = frozenset({"output_attentions", "output_hidden_states", "deterministic", "position_bias", "is_causal"})


class _DecoderAttention:
    """The implementation of the decoder's trace."""

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
        softcap: float | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention as Transformers calls it: query [1, H, T, D], key [1, Hk, T or E, D], value [1, Hk, T or E, Dv].

        Returns:
            [1, T, H, Dv], and no attention weights.
        """
        if getattr(module, _PART, None) != "cross":
            said: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "softcap": softcap, **kwargs}
            table = None
            if position_bias is not None:
                table = self._tables.of(module)
                if table is None:
                    said["position_bias"] = position_bias
            return mllm_attention(module, query, key, value, attention_mask, distance_bias=table, **said)
        refusals = [f"keyword {name}" for name in sorted(kwargs) if kwargs[name] is not None and not _is_known(name)]
        if attention_mask is not None:
            refusals.append("an attention mask")
        if dropout:
            refusals.append("dropout")
        _, num_heads, num_tokens, head_dim = query.shape
        flat_query = query.transpose(1, 2).reshape(num_tokens, num_heads, head_dim).contiguous()
        scale = float(head_dim**-0.5 if scaling is None else scaling)
        shape = key.shape[1], key.shape[3], value.shape[3]
        out = torch.ops.mllm.cross_attention(flat_query, *shape, scale, float(softcap or 0.0), "; ".join(refusals))
        if _SEEN.said is not None:
            out = torch.where(_SEEN.said[:, None, None], out, 0)
        return out.unsqueeze(0), None


class _Seen:
    """The tokens of the call that is traced that attend to states at all, [T] bool; None: all do."""

    said: torch.Tensor | None = None


_SEEN = _Seen()


def say_seen(attends: torch.Tensor | None) -> None:
    """Says which tokens attend to states in calls that come, [T] bool; called within a trace."""
    _SEEN.said = attends


class _Kept:
    """The keys and values of the call that is traced: k [E, Hk, D] and v [E, Hk, Dv] of each."""

    pairs: list[torch.Tensor]


_KEPT = _Kept()


class _SourceAttention:
    """The implementation of the source's trace."""

    def __init__(self, texts: TextsAttention) -> None:
        self._texts = texts

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention as Transformers calls it; of the decoder's the output is zeros, and nobody reads it."""
        if not hasattr(module, _PART):
            return self._texts(module, query, key, value, attention_mask, **kwargs)
        if getattr(module, _PART) == "cross":
            _KEPT.pairs.append(key.transpose(1, 2).flatten(0, 1))
            _KEPT.pairs.append(value.transpose(1, 2).flatten(0, 1))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


@contextmanager
def attending_to_pages(model: Any, cross: CrossAttention) -> Iterator[None]:
    """Within the context the decoder attends by ops, to the encoder's states by one without keys."""
    AttentionInterface.register(_DECODER, _DecoderAttention(distance_tables(model.get_decoder())))
    try:
        with _marked(model, cross), attending_by(model, _DECODER):
            yield
    finally:
        say_seen(None)


@contextmanager
def keeping_keys(model: Any, cross: CrossAttention) -> Iterator[None]:
    """Within the context the encoder attends within the bounds that say_bounds says, and the decoder not at all."""
    texts = TextsAttention(distance_tables(model.get_encoder()))
    AttentionInterface.register(_SOURCE, _SourceAttention(texts))
    try:
        with _marked(model, cross), attending_by(model, _SOURCE):
            yield
    finally:
        say_bounds(None)
        _KEPT.pairs = []


@contextmanager
def _marked(model: Any, cross: CrossAttention) -> Iterator[None]:
    """Within the context the decoder's modules say which part they are of."""
    parts: dict[Any, str] = dict.fromkeys(model.get_decoder().modules(), "decoder")
    parts |= dict.fromkeys(cross.modules, "cross")
    for module, part in parts.items():
        setattr(module, _PART, part)
    try:
        yield
    finally:
        for module in parts:
            delattr(module, _PART)


def begin_keeping() -> None:
    """Forgets what was kept; called within a trace."""
    _KEPT.pairs = []


def kept() -> tuple[torch.Tensor, ...]:
    """k [E, Hk, D] and v [E, Hk, Dv] of each attention to the encoder's states, in the order of the calls."""
    return tuple(_KEPT.pairs)


def _is_known(name: str) -> bool:
    return name in _MEANT_FOR_CACHES or name in _OUTPUTS
