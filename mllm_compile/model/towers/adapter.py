"""The adapter of a protocol of towers: it says what a model's tower is like, and traces tower and text apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.with_features import trace_with_features
from mllm_compile.model.trace import Trace, capture
from mllm_compile.runtime.media.tower import MAX_FEATURES, Grid, Tower


class TowerAdapter(ABC):
    """The adapter of one model.

    Args:
        hf_model: the model, traced before or not.
        facts: what the runtime is to know of the tower.

    Attributes:
        attends_by_itself: the tower attends within rows of a batch, not by the interface.
        has_adapter_apart: published weights have an adapter for sounds in a folder of its own.
    """

    attends_by_itself: bool = False
    has_adapter_apart: bool = False

    @property
    def marks(self) -> tuple[int, int] | None:
        """Tokens before and behind an image by which the model's own forward finds it; None: it needs none."""
        return None

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
        """The arguments, beside its ids [n], that give the model's own forward a prompt's images: pixels as
        Tower.inputs takes them, and grids."""


def traced_tower(hf_model: HFModel, module: torch.nn.Module, inputs: dict[str, torch.Tensor], device: str) -> Trace:
    """The trace of `module`, a tower as a function of its inputs, without nodes that no feature needs: pooling heads,
    and sizes for replaced nodes.

    Raises:
        UnsupportedModelError: it cannot be traced as one graph.
    """
    graph = capture(hf_model, module, inputs, device)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return Trace(graph, MAX_FEATURES, device)


def placeholder_of(hf_model: HFModel, token: Any, noun: str = "image") -> int:
    """The token that is where a feature goes: `token`, the config's image_token_id or that of a sound.

    Raises:
        UnsupportedModelError: the model's embedding has no row for it.
    """
    if not isinstance(token, int) or not 0 <= token < hf_model.sizes().vocab_size:
        raise refusal(f"its placeholder is {token!r}, and no row of its embedding", noun)
    return token


def refusal(what: str, noun: str = "image") -> UnsupportedModelError:
    """The error for a model whose images, or sounds, cannot be served."""
    return UnsupportedModelError(f"the model's {noun}s cannot be served: {what}. docs/{noun}s.md lists what is.")
