"""Disentangled attention, as DeBERTa has it: scores of contents with each other, and of contents with distances.

Its modules attend past Transformers' interface, and make scores and masks of tokens x tokens. Within a trace they
attend by the op of packed texts, which is told the projections of the distances (ops/segments/distance_scores.py).
Modules are known by what they have. The column of a distance is the encoder's own function, asked once when the model
is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.runtime.ops.segments.distance_scores import DistanceScores

if TYPE_CHECKING:
    from mllm_compile.model.hf_model import HFModel

_COLUMNS = "distance_columns"
_PARTS = ("pos_att_type", "num_attention_heads", "pos_dropout")


def is_disentangled(module: torch.nn.Module) -> bool:
    """True for attention of this kind; without relative positions it is found in the trace as others' is."""
    has_parts = all(hasattr(module, name) for name in _PARTS) and bool(getattr(module, "relative_attention", False))
    return has_parts and "rel_embeddings" in inspect.signature(type(module).forward).parameters


def with_distance_columns(hf_model: HFModel) -> HFModel:
    """The model whose encoders of this kind have a buffer [2R + 1] of the columns of distances j - i; R is the longest
    text that it takes."""
    found: dict[str, torch.Tensor] = {}
    for name, module in hf_model.model.named_modules():
        attentions: list[Any] = [one for one in module.modules() if is_disentangled(one)]
        if not attentions or not hasattr(module, "get_rel_pos"):
            continue
        encoder: Any = module
        one, many = torch.zeros(1, 1, 1), torch.zeros(1, hf_model.context_len + 1, 1)
        ahead = encoder.get_rel_pos(many, one)[0, 0]  # of keys behind the one query: j - i is 0 and above
        behind = encoder.get_rel_pos(one, many)[0, :, 0]
        span = _span(attentions[0])
        columns = (torch.cat((behind.flip(0)[:-1], ahead)) + span).clamp(0, 2 * span - 1).long()
        encoder.register_buffer(_COLUMNS, torch.empty_like(columns, device="meta"), persistent=False)
        found[f"{name}.{_COLUMNS}"] = columns
    return replace(hf_model, constants=hf_model.constants | found) if found else hf_model


@contextmanager
def attending_disentangled(model: torch.nn.Module, attend: Callable[..., Any]) -> Iterator[None]:
    """Within the context modules of this kind call `attend`, as the interface does, and no encoder makes tensors of
    tokens x tokens."""
    encoders: list[Any] = [module for module in model.modules() if hasattr(module, _COLUMNS)]
    replaced: list[tuple[Any, str]] = []
    for encoder in encoders:
        own: list[Any] = [module for module in encoder.modules() if is_disentangled(module)]
        for module in own:
            module.forward = _forward_of(module, encoder, attend)
        encoder.get_rel_pos = lambda *args, **kwargs: None
        encoder.get_attention_mask = lambda mask: mask
        replaced += [(encoder, "get_rel_pos"), (encoder, "get_attention_mask"), *((one, "forward") for one in own)]
    try:
        yield
    finally:
        for owner, name in replaced:
            delattr(owner, name)


def _span(attention: Any) -> int:
    """How many columns the distances of one direction have."""
    return int(getattr(attention, "pos_ebd_size", attention.max_relative_positions))


def _forward_of(module: Any, encoder: Any, attend: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, None]]:
    unserved = {"talking_head": True} if getattr(module, "talking_head", False) else {}
    project = _of_one_projection if hasattr(module, "in_proj") else _of_three_projections
    scale = float((module.attention_head_size * (1 + len(module.pos_att_type))) ** -0.5)
    span = _span(module)

    def forward(
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        *args: Any,
        rel_embeddings: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        assert rel_embeddings is not None, "encoders of relative attention give them"
        q, k, v = (x.transpose(1, 2) for x in project(module, hidden_states))
        keys, queries = _of_distances(module, rel_embeddings[: 2 * span])
        distances = DistanceScores(keys, queries, encoder.distance_columns)
        out, _ = attend(module, q, k, v, None, scaling=scale, is_causal=False, distances=distances, **unserved)
        return out.flatten(2), None

    return forward


def _heads(module: Any, x: torch.Tensor) -> torch.Tensor:
    heads: torch.Tensor = x.unflatten(-1, (module.num_attention_heads, -1))
    return heads


def _of_three_projections(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v [1, T, H, D] of DeBERTa-v2."""
    return tuple(_heads(module, part(hidden)) for part in (module.query_proj, module.key_proj, module.value_proj))


def _of_one_projection(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v [1, T, H, D] of DeBERTa, whose one product has each head's three parts beside each other."""
    q, k, v = _heads(module, module.in_proj(hidden)).chunk(3, -1)
    return q + _heads(module, module.q_bias), k, v + _heads(module, module.v_bias)


def _of_distances(module: Any, embeddings: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The projections that queries and that keys are multiplied by, [W, H, D] each, as far as the model has them."""
    if getattr(module, "share_att_key", False):
        of_keys, of_queries = module.key_proj, module.query_proj
    else:
        of_keys = getattr(module, "pos_key_proj", getattr(module, "pos_proj", None))
        of_queries = getattr(module, "pos_query_proj", getattr(module, "pos_q_proj", None))
    keys = _heads(module, of_keys(embeddings)) if "c2p" in module.pos_att_type else None
    queries = _heads(module, of_queries(embeddings)) if "p2c" in module.pos_att_type else None
    return keys, queries
