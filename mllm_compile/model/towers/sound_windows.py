"""The protocol of towers that take whole windows of sound, as Whisper's encoder: Qwen2-Audio, Voxtral, Audio
Flamingo 3, GLM-ASR.

A model has it if its base has an `audio_tower` with two convolutions and a `multi_modal_projector`. The tower runs on
whole windows; which of its rows become features follows from a sound's length and is an input.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.refusals import first_line
from mllm_compile.model.towers.adapter import TowerAdapter, placeholder_of, refusal, traced_tower
from mllm_compile.model.towers.segments_hook import IMAGES_IMPLEMENTATION, packed, say_bounds
from mllm_compile.model.trace import Trace, sized
from mllm_compile.runtime.media.sounds import SoundTower
from mllm_compile.runtime.media.tower import MAX_FEATURES, Grid

SAMPLE_CHUNKS, SAMPLE_FEATURES, SAMPLE_BOUNDS = 3, 12, 5
_MASK = "input_features_mask"


class SoundWindows(TowerAdapter):
    """The adapter; see the module's header."""

    facts: SoundTower

    @classmethod
    def of(cls, hf_model: HFModel) -> SoundWindows | None:
        base: Any = getattr(hf_model.model, "model", None)
        tower: Any = getattr(base, "audio_tower", None)
        if not all(hasattr(tower, part) for part in ("conv1", "conv2", "layers")):
            return None
        if not hasattr(base, "multi_modal_projector"):
            return None
        config = tower.config
        places = getattr(config, "max_source_positions", None) or getattr(config, "max_position_embeddings", None)
        if not isinstance(places, int):
            raise refusal("its tower's config names no max_source_positions", "sound")
        halvings = sum(convolution.stride[0] == 2 for convolution in (tower.conv1, tower.conv2))
        frames = places << halvings
        features = _probe(hf_model, base, (config.num_mel_bins, frames))
        takes_mask = not hasattr(base, "get_audio_features") or _takes(base.get_audio_features, _MASK)
        facts = SoundTower(
            bins=config.num_mel_bins,
            frames=frames,
            halvings=halvings,
            merge=places // features.shape[0],
            feature_width=features.shape[1],
            image_token_id=placeholder_of(hf_model, sound_token(hf_model), "sound"),
            keeps_filling=not takes_mask,
            sees_filling=not takes_mask or not any(_takes(tower.forward, name) for name in (_MASK, "attention_mask")),
        )
        return cls(hf_model, facts)

    def trace_tower(self, device: str) -> Trace:
        """Inputs as SoundTower.input_names, outputs [N, hidden]."""
        base: Any = self.hf_model.model.model
        inputs = sample_inputs(self.facts, self.hf_model.model.dtype, device)
        with packed(base.audio_tower, IMAGES_IMPLEMENTATION):
            return traced_tower(self.hf_model, _Tower(base, self.facts), inputs, device)

    def said_of(self, images: Sequence[tuple[torch.Tensor, Grid]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        facts = self.facts
        windows = torch.cat([pixels for pixels, _ in images]).view(-1, facts.bins, facts.frames)
        lengths = torch.tensor([grid[1] for _, grid in images])
        mask = (torch.arange(facts.frames) < lengths[:, None]).long()
        return {"input_features": windows.to(ids.device), **said_masks(self.hf_model.model, mask.to(ids.device))}


def sound_token(hf_model: HFModel) -> Any:
    """The config's token that stands for a sound's feature."""
    config = hf_model.model.config
    of_tower = getattr(getattr(config, "audio_config", None), "audio_token_id", None)
    return getattr(config, "audio_token_id", getattr(config, "audio_token_index", of_tower))


def said_masks(model: Any, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The mask of a sound's frames [windows, frames], as an argument of the model's own forward."""
    return {name: mask for name in ("feature_attention_mask", _MASK) if _takes(model.forward, name)}


def sample_inputs(facts: SoundTower, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Inputs of a trace, whose numbers of chunks, bounds and features are of any size."""
    edges = {} if facts.edges == "given" else {"edges": sized("F", (SAMPLE_CHUNKS,), torch.int64, device)}
    return {
        "pixel_values": sized("F", (SAMPLE_CHUNKS, facts.pixel_width), dtype, device),
        "cu_seqlens": sized("cu_seqlens", (SAMPLE_BOUNDS,), torch.int32, device),
        "taps": sized("N", (SAMPLE_FEATURES,), torch.int64, device),
        **edges,
    }


def check_sizes(pixel_values: torch.Tensor, taps: torch.Tensor) -> None:
    """Says the range of the sizes; called within a trace."""
    for one in (pixel_values, taps):
        torch._check(one.shape[0] >= 1)
        torch._check(one.shape[0] <= MAX_FEATURES)


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


def _features(base: Any, windows: torch.Tensor) -> torch.Tensor:
    """Features [N, hidden] of windows [F, bins, frames], in the order of a model's own modules."""
    tower = base.audio_tower
    masks = {}
    if _takes(tower.forward, _MASK):
        masks[_MASK] = torch.ones((windows.shape[0], windows.shape[2]), dtype=torch.int64, device=windows.device)
    rows = tower(windows, **masks, return_dict=True).last_hidden_state
    project = base.multi_modal_projector
    first = next(module for module in project.modules() if isinstance(module, torch.nn.Linear))
    features: torch.Tensor = project(rows.reshape(-1, first.in_features))
    return features


def _probe(hf_model: HFModel, base: Any, shape: tuple[int, int]) -> torch.Tensor:
    """Runs the tower on a fake window: its features [N, hidden]."""
    weight: Any = next(hf_model.model.parameters())
    mode = weight.fake_mode if isinstance(weight, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, packed(base.audio_tower, IMAGES_IMPLEMENTATION), torch.no_grad():
            say_bounds(torch.zeros(2, dtype=torch.int32, device=weight.device))
            return _features(base, torch.zeros(1, *shape, device=weight.device, dtype=hf_model.model.dtype))
    except Exception as error:  # whatever a model raises that is called otherwise
        raise refusal(
            f"its tower does not run on windows of {list(shape)} alone ({first_line(error)})", "sound"
        ) from error


class _Tower(torch.nn.Module):
    def __init__(self, base: Any, facts: SoundTower) -> None:
        super().__init__()
        self.base, self.shape = base, (facts.bins, facts.frames)

    def forward(self, pixel_values: torch.Tensor, cu_seqlens: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        check_sizes(pixel_values, taps)
        say_bounds(cu_seqlens)
        return _features(self.base, pixel_values.view(-1, *self.shape))[taps]
