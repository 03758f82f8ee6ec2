"""The protocol of towers that pack the patches of images of any size: Pixtral, in Mistral 3 and in LLaVA.

Such a tower cuts images itself, by their sizes, which are data. So its modules are called in its order on patches that
were cut before (runtime/media/packed.py). Patches of a feature are together, as a merger expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.adapter import TowerAdapter, placeholder_of, refusal, traced_tower
from mllm_compile.model.towers.segments_hook import packed, say_bounds
from mllm_compile.model.trace import Trace, sized
from mllm_compile.runtime.media.packed import PackedTower
from mllm_compile.runtime.media.tower import MAX_FEATURES, Grid

_SAMPLE_FEATURES = 12
_SAMPLE_BOUNDS = 3
_PARTS = ("patch_conv", "ln_pre", "patch_positional_embedding", "transformer")


class PackedImages(TowerAdapter):
    """The adapter; see the module's header."""

    facts: PackedTower

    @classmethod
    def of(cls, hf_model: HFModel) -> PackedImages | None:
        base: Any = getattr(hf_model.model, "model", None)
        tower: Any = getattr(base, "vision_tower", None)
        config = hf_model.model.config
        if not hasattr(tower, "patch_conv") or not hasattr(base, "multi_modal_projector"):
            return None
        if missing := [part for part in _PARTS if not hasattr(tower, part)]:
            raise refusal(f"its tower has no {missing[0]}")
        if getattr(config, "vision_feature_select_strategy", "full") != "full":
            raise refusal("vision_feature_select_strategy drops a patch of each image")
        vision, token = tower.config, placeholder_of(hf_model, config.image_token_id)
        facts = PackedTower(
            merge=getattr(config, "spatial_merge_size", 1),
            patch_width=vision.num_channels * vision.patch_size**2,
            channels=vision.num_channels,
            patch_size=vision.patch_size,
            feature_width=hf_model.sizes().hidden_size,
            image_token_id=token,
        )
        return cls(hf_model, facts)

    def trace_tower(self, device: str) -> Trace:
        """Inputs as PackedTower.input_names, outputs [F, hidden]."""
        facts, unit, base = self.facts, self.facts.merge**2, self.hf_model.model.model
        inputs = {
            "pixel_values": sized("F", (_SAMPLE_FEATURES, facts.pixel_width), self.hf_model.model.dtype, device),
            "position_ids": sized("F", (_SAMPLE_FEATURES, unit, 2), torch.int64, device),
            "cu_seqlens": sized("cu_seqlens", (_SAMPLE_BOUNDS,), torch.int32, device),
        }
        with packed(base.vision_tower), _merging_neighbours(base, unit):
            return traced_tower(self.hf_model, _Tower(base, facts), inputs, device)

    def said_of(self, images: Sequence[tuple[torch.Tensor, Grid]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        whole = [self._whole(patches, grid) for patches, grid in images]
        sizes = torch.tensor([image.shape[1:] for image in whole])
        padded = torch.zeros(len(whole), self.facts.channels, *sizes.amax(0).tolist())
        for place, image in zip(padded, whole, strict=True):
            place[:, : image.shape[1], : image.shape[2]] = image
        return {"pixel_values": padded.to(ids.device), "image_sizes": sizes.to(ids.device)}

    def _whole(self, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
        """The image [channels, rows, columns] that PackedTower.cut has cut."""
        facts, merge = self.facts, self.facts.merge
        size = facts.patch_size
        blocks = patches.view(grid[1] // merge, grid[2] // merge, merge, merge, facts.channels, size, size)
        return blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(facts.channels, grid[1] * size, grid[2] * size)


@contextmanager
def _merging_neighbours(base: Any, unit: int) -> Iterator[None]:
    """Within the context a merger takes the patches of a feature one after another: it would look for them by sizes."""
    merger = getattr(base.multi_modal_projector, "patch_merger", None)
    if merger is not None:
        merger.forward = lambda patches, sizes: merger.merging_layer(
            patches.view(-1, unit, patches.shape[-1]).transpose(1, 2).flatten(1)
        )
    try:
        yield
    finally:
        if merger is not None:
            del merger.forward


class _Tower(torch.nn.Module):
    def __init__(self, base: Any, facts: PackedTower) -> None:
        super().__init__()
        self.base, self.facts = base, facts

    def forward(self, pixel_values: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        torch._check(pixel_values.shape[0] >= 1)
        torch._check(pixel_values.shape[0] <= MAX_FEATURES)
        say_bounds(cu_seqlens)
        facts, tower = self.facts, self.base.vision_tower
        patches = pixel_values.view(-1, facts.channels, facts.patch_size, facts.patch_size)
        hidden = tower.ln_pre(tower.patch_conv(patches).flatten(1)[None])
        places = tower.patch_positional_embedding(hidden, position_ids.flatten(0, 1))
        states = [hidden]
        for layer in tower.transformer.layers:
            states.append(layer(states[-1], None, position_embeddings=places))
        layers = self.base.config.vision_feature_layer
        chosen = torch.cat([states[layer] for layer in ([layers] if isinstance(layers, int) else layers)], -1)[0]
        project = self.base.multi_modal_projector
        features: torch.Tensor = project(chosen, None) if hasattr(project, "patch_merger") else project(chosen)
        return features
