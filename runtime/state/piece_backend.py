"""Layers with a state by the program's own kernels (ops/states/): a launch for a batch's decodes, and one for its
prompts.

They read rows, lengths and flags of requests on the device, so nothing is planned and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mllm_compile.runtime.attention.layer_kernels import StateKernels
from mllm_compile.runtime.memory_pool import GDNPool
from mllm_compile.runtime.state.base import StateBackend, StateInputs

StatePieces = StateKernels[Callable[[list[torch.Tensor]], Any]]


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

    def forward(self, inputs: StateInputs) -> None:
        pieces, metadata = self._pieces.get(inputs.layer.name), inputs.metadata
        if pieces is None:
            self._others.forward(inputs)
            return
        given = [*inputs.operands.values(), self._pool.get_state(inputs.layer.state_id)]
        if metadata.are_runs:  # their padding are tokens of the batch, and what they leave must be numbers
            inputs.out.zero_()
        if metadata.of_decodes is not None:
            pieces.decodes([*given, *metadata.of_decodes, inputs.out])
        if metadata.of_prompts is not None:
            # A captured step knows its size alone; others choose by what they compute, however it is padded.
            count = metadata.num_actual_tokens if metadata.mixed is None else inputs.out.shape[0]
            pieces.prompts_of(count)([*given, *metadata.of_prompts, inputs.out])
