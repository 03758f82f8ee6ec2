"""Layers with a state by the program's own kernels (ops/states/): a launch for a batch's decodes, and one for its
prompts.

They read rows, lengths and flags of requests on the device, so nothing is planned and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mllm_compile.runtime.memory_pool import GDNPool
from mllm_compile.runtime.state.base import StateBackend, StateInputs
from mllm_compile.runtime.state.layer import StateLayer

CONVOLVED = 3  # of a gated delta rule's operands: q, k and v


@dataclass(frozen=True)
class Mixer:
    """A kernel that computes a layer's decodes together with the convolution ahead.

    Attributes:
        conv: the convolution, which makes the first CONVOLVED operands.
        decodes: (*the convolution's operands, its states, *the layer's other operands, its states, rows, has_state,
            out).
    """

    conv: StateLayer
    decodes: Callable[[list[torch.Tensor]], Any]


@dataclass(frozen=True)
class StatePieces:
    """A layer's kernels; arguments as its op has them, those that the layer has.

    Attributes:
        decodes: (*operands, states, rows, has_state, out): request i has token i alone.
        prompts: (*operands, states, rows, has_state, starts, ends, out).
        mixer: for steps of decodes alone, in place of `decodes` and of the convolution's.
    """

    decodes: Callable[[list[torch.Tensor]], Any]
    prompts: Callable[[list[torch.Tensor]], Any]
    mixer: Mixer | None = None


class PieceStateBackend(StateBackend):
    """
    Args:
        pieces: layer → its kernels.
        others: computes layers that have none.
    """

    def __init__(self, pool: GDNPool, pieces: Mapping[str, StatePieces], others: StateBackend) -> None:
        self._pool = pool
        self._pieces = pieces
        self._others = others
        self._left = {one.mixer.conv.name for one in pieces.values() if one.mixer is not None}

    def forward(self, inputs: StateInputs) -> None:
        pieces, metadata = self._pieces.get(inputs.layer.name), inputs.metadata
        if pieces is None:
            self._others.forward(inputs)
            return
        if metadata.of_prompts is None and inputs.layer.name in self._left:
            return  # the layer behind takes it along
        if metadata.of_prompts is None and metadata.of_decodes is not None and pieces.mixer is not None:
            kept, states = (self._pool.get_state(one.state_id) for one in (pieces.mixer.conv, inputs.layer))
            rest = list(inputs.operands.values())[CONVOLVED:]
            pieces.mixer.decodes([*inputs.unconvolved, kept, *rest, states, *metadata.of_decodes, inputs.out])
            return
        given = [*inputs.operands.values(), self._pool.get_state(inputs.layer.state_id)]
        if metadata.are_runs:  # their padding are tokens of the batch, and what they leave must be numbers
            inputs.out.zero_()
        if metadata.of_decodes is not None:
            pieces.decodes([*given, *metadata.of_decodes, inputs.out])
        if metadata.of_prompts is not None:
            pieces.prompts([*given, *metadata.of_prompts, inputs.out])
