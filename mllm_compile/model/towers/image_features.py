"""The ways from whole images to features: a model's own where a trace holds it, or its modules in its order.

LLaVA makes a list of the images of a batch, and the Idefics family looks for images and parts of them that are
padding: here there are no such parts.
"""

from __future__ import annotations

import inspect
from types import EllipsisType
from typing import Any

import torch


def image_tower_of(base: Any) -> Any:
    """The tower of a model's base, as a module; None: it has none where it is looked for."""
    return getattr(base, "vision_tower", None) or getattr(base, "vision_model", None)


def has_connector(base: Any) -> bool:
    """True for the Idefics family, whose forward drops images that are padding, by their values."""
    return hasattr(base, "connector")


class ImageFeatures(torch.nn.Module):
    """Images [images, channels, rows, columns] → features [images, features, hidden], by a model's base."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.is_indexed_by_mask = has_connector(base) and _is_indexed_by_mask(base.vision_model)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        base, config = self.base, self.base.config
        features: torch.Tensor
        if has_connector(base):
            mask = _Whole(base.vision_model, pixels) if self.is_indexed_by_mask else None
            seen = base.vision_model(pixel_values=pixels, patch_attention_mask=mask, return_dict=True)
            features = base.connector(seen.last_hidden_state)
            return features
        if hasattr(config, "downsample_ratio") or not hasattr(config, "vision_feature_layer"):
            features = base.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
            return features
        layers = config.vision_feature_layer
        states = base.vision_tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        chosen = [states[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
        if config.vision_feature_select_strategy == "default":
            chosen = [one[:, 1:] for one in chosen]
        features = base.multi_modal_projector(torch.cat(chosen, -1))
        return features


def _is_indexed_by_mask(tower: Any) -> bool:
    """True if places are written where a mask says so (Transformers 5.17), whose number of elements is data."""
    return "[patch_attention_mask" in inspect.getsource(type(tower.embeddings).forward)


class _Whole:
    """Stands for a mask [images, rows, columns] that leaves out nothing: an index by it is one of everything."""

    def __init__(self, tower: Any, pixels: torch.Tensor) -> None:
        rows, columns = (length // tower.patch_size for length in pixels.shape[2:])
        self.shape = pixels.shape[0], rows, columns
        self.device = pixels.device

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.ones(self.shape, dtype=torch.bool, device=self.device)[index]

    def view(self, *shape: int) -> EllipsisType:
        return ...
