"""Attention that a model computes itself, past Transformers' interface, with projections q, k, v and o: MPNet's.

Within a trace such modules attend by the op, in both directions. The encoder's bias of tokens x tokens is not computed:
distance_bias.py has its table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mllm_compile.model.replaced_methods import with_methods

_PROJECTIONS = ("q", "k", "v", "o", "num_attention_heads", "attention_head_size")


def attends_itself(module: torch.nn.Module) -> bool:
    """True for a module of this kind."""
    has_parts = all(hasattr(module, name) for name in _PROJECTIONS)
    return has_parts and "position_bias" in inspect.signature(type(module).forward).parameters


@contextmanager
def attending_past_the_interface(model: torch.nn.Module, attend: Callable[..., Any]) -> Iterator[None]:
    """Within the context modules of this kind call `attend`, as the interface does."""
    own: list[Any] = [module for module in model.modules() if attends_itself(module)]
    makers: list[Any] = [module for module in model.modules() if own and hasattr(module, "compute_position_bias")]
    no_bias = [
        (maker, "compute_position_bias", lambda hidden, *args, **kwargs: hidden.new_zeros(())) for maker in makers
    ]
    with with_methods([*((module, "forward", _forward_of(module, attend)) for module in own), *no_bias]):
        yield


def _forward_of(module: Any, attend: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor]]:
    def forward(
        hidden_states: torch.Tensor, attention_mask: Any = None, position_bias: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor]:
        shape = (*hidden_states.shape[:-1], module.num_attention_heads, module.attention_head_size)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (module.q, module.k, module.v))
        out, _ = attend(module, q, k, v, attention_mask, is_causal=False, position_bias=position_bias)
        return (module.o(out.flatten(2)),)

    return forward
