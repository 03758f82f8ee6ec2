"""The layers that a model runs for a token, counted without a trace: attentions, and recurrences with their states.

A model's config says in a way of its own which layers are which. Its code, run on meta with the hooks of a trace, calls
an op for each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mllm_compile.model.experts_hook import experts_as_ops
from mllm_compile.model.refusals import refusing
from mllm_compile.model.states.state_hook import has_states, states_as_ops
from mllm_compile.model.written_attention.indexed import choosing_every_key
from mllm_compile.runtime.ops.states.trace import call_of
from mllm_compile.runtime.state.layer import KINDS

_TOKENS = 4


@dataclass
class LayerCounts:
    """
    Attributes:
        kv_values: numbers that a token has in the KV cache.
        attention_widths: the widths of all query heads, of their keys and of their values, added up.
        held_values: numbers of a request's states that are inputs, in the model's type.
        summed_values: those that are sums, in runtime.state_dtype.
    """

    kv_values: int = 0
    attention_widths: int = 0
    held_values: int = 0
    summed_values: int = 0


def count_layers(model: Any) -> LayerCounts | None:
    """The layers of a causal LM on meta; None where it carries no state: its config then suffices.

    Raises:
        UnsupportedModelError: its code does not run on meta.
    """
    if not has_states(model):
        return None
    counting = _Counting()
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    hooks = states_as_ops(model), experts_as_ops(model), choosing_every_key(model)
    running = refusing(f"{model.config.model_type!r} does not run on meta")
    with running, torch.no_grad(), hooks[0], hooks[1], hooks[2], counting:
        model(input_ids=ids, position_ids=torch.arange(_TOKENS, device="meta")[None], use_cache=False)
    return counting.counts


@dataclass
class _Counting(TorchDispatchMode):
    """Adds up the layers of every call of these ops."""

    counts: LayerCounts = field(default_factory=LayerCounts)

    def __post_init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "mllm" and name == "attention":
            (_, heads, width), (_, kv_heads, _), (_, _, value_width) = (x.shape for x in args[:3])
            self.counts.kv_values += kv_heads * (width + value_width)
            self.counts.attention_widths += heads * (width + value_width)
        elif namespace == "mllm" and name in KINDS:
            kind, operands = call_of(name, args)
            size = math.prod(kind.state_shape({key: value.shape for key, value in operands.items()}))
            if kind.holds_inputs:
                self.counts.held_values += size
            else:
                self.counts.summed_values += size
        return func(*args, **(kwargs or {}))
