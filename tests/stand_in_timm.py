"""A stand-in for timm, which Gemma 3n's images need and tests do without: convolutions, and attention to places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch

SIDE, PLACES, WIDTH = 24, 9, 16  # of an image; features that it becomes, and numbers of one ahead of the projection


class _Backbone(torch.nn.Module):
    """Images [N, 3, SIDE, SIDE] to maps [N, WIDTH, 3, 3]."""

    pretrained_cfg: ClassVar[dict[str, tuple[int, int, int]]] = {"input_size": (3, SIDE, SIDE)}

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 4, stride=4, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.places = torch.nn.Conv2d(8, 24, 1)
        self.end = torch.nn.Conv2d(8, WIDTH, 3, stride=2, padding=1)

    def forward_features(self, pixels: torch.Tensor) -> torch.Tensor:
        seen = torch.nn.functional.gelu(self.norm(self.stem(pixels)))
        queries, keys, values = self.places(seen).flatten(2).transpose(1, 2)[:, None].chunk(3, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
        maps: torch.Tensor = self.end(seen + attended[:, 0].transpose(1, 2).reshape(seen.shape))
        return maps


@contextmanager
def standing_in() -> Iterator[None]:
    """Within the context Transformers builds towers of timm."""
    from transformers.models.timm_wrapper import modeling_timm_wrapper as wrapper

    def create_model(name: str, **settings: Any) -> _Backbone:
        return _Backbone()

    with (
        patch.object(wrapper, "timm", SimpleNamespace(create_model=create_model), create=True),
        patch.object(wrapper, "requires_backends", lambda *_: None),
    ):
        yield
