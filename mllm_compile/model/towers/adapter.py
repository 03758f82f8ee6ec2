"""The adapter of a protocol of towers: it says what a model's tower is like, and traces tower and text apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.with_features import trace_with_features
from mllm_compile.model.trace import Trace
from mllm_compile.runtime.media.tower import Grid, Tower


class TowerAdapter(ABC):
    """The adapter of one model.

    Args:
        hf_model: the model, traced before or not.
        facts: what the runtime is to know of the tower.
    """

    def __init__(self, hf_model: HFModel, facts: Tower) -> None:
        self.hf_model = hf_model
        self.facts = facts

    @classmethod
    @abstractmethod
    def of(cls, hf_model: HFModel) -> TowerAdapter | None:
        """The model's; None: it has no tower of this protocol.

        Raises:
            UnsupportedModelError: it has one that differs in what the adapter relies on.
        """

    @abstractmethod
    def trace_tower(self, device: str) -> Trace:
        """The tower as a program: inputs as Tower.input_names, outputs [features, hidden].

        Raises:
            UnsupportedModelError: it cannot be traced as one graph.
        """

    def trace_text(self, device: str, max_tokens: int) -> Trace:
        """The text with features (with_features.py). Raises UnsupportedModelError as trace_tower."""
        return trace_with_features(self.hf_model, self.facts, device, max_tokens)

    @abstractmethod
    def said_of(self, images: Sequence[tuple[torch.Tensor, Grid]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arguments, beside its ids [n], by which the model's own forward is told of a prompt's images: pixels as
        Tower.inputs takes them, and grids."""


def refusal(what: str) -> UnsupportedModelError:
    """The error for a model whose images cannot be served."""
    return UnsupportedModelError(f"the model's images cannot be served: {what}. docs/images.md lists what is.")
