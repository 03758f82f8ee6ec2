"""The protocol of towers that take patches with the place of each: Gemma 4.

Such a tower looks for padding and pools by places, which are data. So its modules are called in its order on packed
patches without padding. Patches of a feature are together, and their mean is the feature. Its images see ahead in
layers with windows, if the text's config says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.adapter import TowerAdapter, placeholder_of, refusal, traced_tower
from mllm_compile.model.towers.segments_hook import packed, say_bounds
from mllm_compile.model.trace import Trace, sized
from mllm_compile.runtime.media.placed import PlacedTower
from mllm_compile.runtime.media.tower import MAX_FEATURES, Grid

_SAMPLE_FEATURES = 12
_SAMPLE_BOUNDS = 3


class PlacedPatches(TowerAdapter):
    """The adapter; see the module's header."""

    facts: PlacedTower

    @classmethod
    def of(cls, hf_model: HFModel) -> PlacedPatches | None:
        base: Any = getattr(hf_model.model, "model", None)
        tower: Any = getattr(base, "vision_tower", None)
        if not hasattr(tower, "patch_embedder") or not hasattr(tower, "pooler") or not hasattr(base, "embed_vision"):
            return None
        config: Any = hf_model.model.config
        vision, token = tower.config, placeholder_of(hf_model, config.image_token_id)
        ahead = config.get_text_config().use_bidirectional_attention
        if ahead not in (None, "vision"):
            raise refusal(f"its use_bidirectional_attention is {ahead!r}, and expected is None or 'vision'")
        facts = PlacedTower(
            merge=vision.pooling_kernel_size,
            patch_width=3 * vision.patch_size**2,
            feature_width=hf_model.sizes().hidden_size,
            image_token_id=token,
            sees_ahead=ahead == "vision",
        )
        return cls(hf_model, facts)

    def trace_tower(self, device: str) -> Trace:
        """Inputs as PlacedTower.input_names, outputs [F, hidden]."""
        facts, unit, base = self.facts, self.facts.merge**2, self.hf_model.model.model
        inputs = {
            "pixel_values": sized("F", (_SAMPLE_FEATURES, facts.pixel_width), self.hf_model.model.dtype, device),
            "position_ids": sized("F", (_SAMPLE_FEATURES, unit, 2), torch.int64, device),
            "cu_seqlens": sized("cu_seqlens", (_SAMPLE_BOUNDS,), torch.int32, device),
        }
        with packed(base.vision_tower):
            return traced_tower(self.hf_model, _Tower(base, facts), inputs, device)

    def said_of(self, images: Sequence[tuple[torch.Tensor, Grid]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        facts, merge = self.facts, self.facts.merge
        most = max(len(pixels) for pixels, _ in images) * merge**2
        padded = torch.zeros(len(images), most, facts.patch_width)
        places = torch.full((len(images), most, 2), -1)
        for index, (pixels, grid) in enumerate(images):
            count = grid[1] * grid[2]
            of_rows = torch.from_numpy(facts.inputs(grid)["position_ids"]).view(-1, 2)
            padded[index, :count], places[index, :count] = pixels.view(-1, facts.patch_width), of_rows.flip(-1)
        return {
            "pixel_values": padded.to(ids.device),
            "image_position_ids": places.to(ids.device),
            "mm_token_type_ids": (ids == facts.image_token_id).long()[None],
        }


class _Tower(torch.nn.Module):
    def __init__(self, base: Any, facts: PlacedTower) -> None:
        super().__init__()
        self.base, self.facts = base, facts

    def forward(self, pixel_values: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        torch._check(pixel_values.shape[0] >= 1)
        torch._check(pixel_values.shape[0] <= MAX_FEATURES)
        say_bounds(cu_seqlens)
        tower, unit = self.base.vision_tower, self.facts.merge**2
        patches = pixel_values.view(-1, self.facts.patch_width)
        places = position_ids.flatten(0, 1).flip(-1)  # column and row
        hidden = tower.patch_embedder(patches, places, torch.zeros_like(places[..., 0], dtype=torch.bool))[None]
        places = places[None]
        turns = tower.encoder.rotary_emb(hidden, places)
        for layer in tower.encoder.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=turns, position_ids=places)
        pooled = hidden[0].unflatten(0, (-1, unit)).float().mean(1).to(hidden.dtype)
        features = pooled.float() * tower.pooler.root_hidden_size
        if tower.config.standardize:
            features = (features - tower.std_bias.float()) * tower.std_scale.float()
        embedded: torch.Tensor = self.base.embed_vision(inputs_embeds=features.to(hidden.dtype))
        return embedded
