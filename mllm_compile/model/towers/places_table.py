"""Towers whose table of places finds by an image's size, which is data, where each patch is: GLM-4V.

Within `spread_by_taps` such a table is read at entries that are given, with their weights (runtime/media/patches.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mllm_compile.model.replaced_methods import with_forwards


class _Taps:
    """The entries [patches, taps] and weights of the call that is traced."""

    said: tuple[torch.Tensor, torch.Tensor] | None = None


_TAPS = _Taps()


def position_table(tower: Any) -> Any:
    """The module that reads a table so; None: the tower has none."""
    module = getattr(tower, "embeddings", None)
    return module if hasattr(module, "position_embedding") and hasattr(module, "interpolated_method") else None


def say_taps(indices: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> None:
    """Taps for a table that is read then; called within a trace."""
    _TAPS.said = None if indices is None or weights is None else (indices, weights)


@contextmanager
def spread_by_taps(tower: Any) -> Iterator[None]:
    """Within the context a tower's own table is read at the taps that were said; of another tower nothing changes."""
    module = position_table(tower)

    def forward(embeddings: torch.Tensor, *sizes_and_places: Any) -> torch.Tensor:
        assert _TAPS.said is not None, "a tower with a table is given taps"
        indices, weights = _TAPS.said
        rows = module.position_embedding.weight.float()[indices]
        placed: torch.Tensor = embeddings + (rows * weights[..., None]).sum(-2).to(embeddings.dtype)
        return placed

    try:
        with with_forwards({} if module is None else {module: forward}):
            yield
    finally:
        say_taps()
