"""The protocol of towers that take crops of an image besides all of it made small: LLaVA-NeXT, LLaVA-OneVision.

A model has it if its base has an `image_newline` besides what images of one size need (fixed_size.py). Its own code
combines a tower's features by the image's size, which is data. So the tower's features for each of the image's are an
input, computed on the host (runtime/media/crops.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.adapter import refusal, traced_tower
from mllm_compile.model.towers.fixed_size import SAMPLE_IMAGES, FixedSizeImages, fixed_size_tower
from mllm_compile.model.towers.image_features import ImageFeatures, image_tower_of
from mllm_compile.model.towers.segments_hook import IMAGES_IMPLEMENTATION, packed, say_bounds
from mllm_compile.model.trace import Trace, sized
from mllm_compile.runtime.media.crops import CropTower
from mllm_compile.runtime.media.tower import MAX_FEATURES, Grid

_SAMPLE_FEATURES = 12


class Crops(FixedSizeImages):
    """The adapter; see the module's header."""

    facts: CropTower

    @classmethod
    def of(cls, hf_model: HFModel) -> Crops | None:
        base: Any = getattr(hf_model.model, "model", None)
        if not hasattr(base, "image_newline") or not hasattr(base, "get_image_features"):
            return None
        config: Any = hf_model.model.config
        plain = fixed_size_tower(hf_model, base)
        videos = getattr(config, "video_token_id", None) if hasattr(base, "apply_pooling") else None
        facts = CropTower(
            **asdict(plain) | {"video_token_id": -1 if videos is None else videos},
            pinpoints=tuple((int(rows), int(columns)) for rows, columns in config.image_grid_pinpoints),
            most_crops=_most_crops(config),
        )
        if facts.side**2 != facts.features or plain.shape[1] != plain.shape[2]:
            raise refusal(f"its tower makes {facts.features} features of an image, which are no square's")
        return cls(hf_model, facts)

    def trace_tower(self, device: str) -> Trace:
        """Inputs: `pixel_values` [F images, pixel_width], `cu_seqlens` [F + 1], and CropTower.make_inputs."""
        base: Any = self.hf_model.model.model
        count, taps = _SAMPLE_FEATURES, self.facts.num_taps
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "taps": ((count, taps), torch.int64),
            "is_row_end": ((count,), torch.bool),
            "tap_weights": ((count, taps), torch.float32),
        }
        inputs = {
            "pixel_values": sized("F", (SAMPLE_IMAGES, self.facts.pixel_width), self.hf_model.model.dtype, device),
            "cu_seqlens": sized("cu_seqlens", (SAMPLE_IMAGES + 1,), torch.int32, device),
            **{name: sized("N", *shapes[name], device) for name in self.facts.input_names() if name in shapes},
        }
        with packed(image_tower_of(base), IMAGES_IMPLEMENTATION):
            return traced_tower(self.hf_model, _Tower(base, self.facts.shape), inputs, device)

    def said_of(self, images: Sequence[tuple[torch.Tensor, Grid]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        most = max(grid[0] for _, grid in images)
        padded = torch.zeros(len(images), most, *self.facts.shape)
        for place, (pixels, grid) in zip(padded, images, strict=True):
            place[: grid[0]] = pixels.view(-1, *self.facts.shape)
        sizes = torch.tensor([grid[1:] for _, grid in images])
        return {"pixel_values": padded.to(ids.device), "image_sizes": sizes.to(ids.device)}


def _most_crops(config: Any) -> int:
    """The crops whose features an image has at most; 0: it has all."""
    ratio = getattr(config, "vision_aspect_ratio", None)
    if ratio is None:
        return 0
    if not isinstance(ratio, str) or not ratio.removeprefix("anyres_max_").isdecimal():
        raise refusal(f"its vision_aspect_ratio is {ratio!r}, and expected is anyres_max_ with a number")
    return int(ratio.removeprefix("anyres_max_"))


class _Tower(torch.nn.Module):
    def __init__(self, base: Any, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.features, self.shape = ImageFeatures(base), shape

    def forward(
        self,
        pixel_values: torch.Tensor,
        cu_seqlens: torch.Tensor,
        taps: torch.Tensor,
        is_row_end: torch.Tensor,
        tap_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        for one in (pixel_values, taps):
            torch._check(one.shape[0] >= 1)
            torch._check(one.shape[0] <= MAX_FEATURES)
        say_bounds(cu_seqlens)
        seen = self.features(pixel_values.view(-1, *self.shape)).flatten(0, 1)
        if tap_weights is None:
            made = seen[taps[:, 0]]
        else:
            made = (seen[taps].float() * tap_weights[..., None]).sum(1).to(seen.dtype)
        return torch.where(is_row_end[:, None], self.features.base.image_newline.to(seen.dtype), made)
