"""The backend of layers with a state: its contract, and one layer's work in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.runtime.state.metadata import StateMetadata
from mllm_compile.runtime.state.reference import Operands


@dataclass(slots=True, eq=False)
class StateInputs:
    """One layer's work in a step.

    Attributes:
        operands: by the kind's names; operands of tokens may have rows of padding behind the batch's.
        out: [T, *out_shape], written; rows of padding keep what they hold.
    """

    operands: Operands
    out: torch.Tensor
    layer: StateLayer
    metadata: StateMetadata


class StateBackend(ABC):
    """Computes layers, and keeps each request's state in its row of a pool."""

    @abstractmethod
    def forward(self, inputs: StateInputs) -> None:
        """Computes the layer for every request of the batch. Steps of decodes alone can be captured."""
