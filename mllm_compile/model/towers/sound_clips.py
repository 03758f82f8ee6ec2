"""The protocol of conformers that take a clip of one length: Gemma 3n's.

Its norms sum over all frames so far, so that a sound is no row among others: each is a window of its own, filled up. A
model has it if its base has an `audio_tower` with blocks (`conformer`) behind two convolutions, and says how many
features a sound becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.adapter import TowerAdapter, placeholder_of, refusal, traced_tower
from mllm_compile.model.towers.sound_windows import SAMPLE_CHUNKS, SAMPLE_FEATURES, check_sizes, said_masks, sound_token
from mllm_compile.model.trace import Trace, sized
from mllm_compile.runtime.media.clips import ClipTower
from mllm_compile.runtime.media.tower import Grid


class SoundClips(TowerAdapter):
    """The adapter; see the module's header."""

    attends_by_itself = True
    facts: ClipTower

    @classmethod
    def of(cls, hf_model: HFModel) -> SoundClips | None:
        base: Any = getattr(hf_model.model, "model", None)
        tower: Any = getattr(base, "audio_tower", None)
        if not all(hasattr(tower, part) for part in ("subsample_conv_projection", "conformer")):
            return None
        config, told = tower.config, hf_model.model.config
        strides = [stride[0] for stride in config.sscp_conv_stride_size]
        reduction = config.conf_reduction_factor
        if strides != [2, 2] or reduction & (reduction - 1):
            raise refusal(f"it leaves a row of {strides} frames and {reduction} rows; expected powers of two", "sound")
        halvings = 1 + reduction.bit_length()
        facts = ClipTower(
            bins=config.input_feat_size,
            frames=told.audio_soft_tokens_per_image << halvings,
            halvings=halvings,
            window=1,
            edges="last",
            feature_width=hf_model.sizes().hidden_size,
            image_token_id=placeholder_of(hf_model, sound_token(hf_model), "sound"),
        )
        return cls(hf_model, facts)

    def trace_tower(self, device: str) -> Trace:
        """Inputs as ConformerTower.input_names, outputs [N, hidden]."""
        facts = self.facts
        counted = {name: sized("F", (SAMPLE_CHUNKS,), torch.int64, device) for name in ("sounds", "edges")}
        inputs = {
            "pixel_values": sized("F", (SAMPLE_CHUNKS, facts.pixel_width), self.hf_model.model.dtype, device),
            **counted,
            "taps": sized("N", (SAMPLE_FEATURES,), torch.int64, device),
        }
        return traced_tower(self.hf_model, _Clips(self.hf_model.model.model, facts), inputs, device)

    def said_of(self, images: Sequence[tuple[torch.Tensor, Grid]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        facts = self.facts
        lengths = torch.tensor([grid[1] for _, grid in images])
        clips = torch.cat([pixels for pixels, _ in images]).view(-1, facts.frames, facts.bins)[:, : int(lengths.max())]
        mask = torch.arange(clips.shape[1]) < lengths[:, None]
        return {"input_features": clips.to(ids.device), **said_masks(self.hf_model.model, mask.to(ids.device))}


class _Clips(torch.nn.Module):
    """The tower and its way to the text's width, as the model's forward has them for a sound by itself."""

    def __init__(self, base: Any, facts: ClipTower) -> None:
        super().__init__()
        self.base, self.facts = base, facts

    def forward(
        self, pixel_values: torch.Tensor, sounds: torch.Tensor, edges: torch.Tensor, taps: torch.Tensor
    ) -> torch.Tensor:
        check_sizes(pixel_values, taps)
        tower, embed = self.base.audio_tower, self.base.embed_audio
        frames = pixel_values.view(-1, self.facts.frames, self.facts.bins)
        hidden, is_filling = self._rows(tower.subsample_conv_projection, frames, edges)
        for block in tower.conformer:
            hidden = block(hidden, is_filling)
        step = tower.config.conf_reduction_factor
        features = embed(inputs_embeds=hidden[:, ::step])
        filled = embed(input_ids=torch.full((1, 1), self.base.vocab_size - 1, device=edges.device))
        features = torch.where(is_filling[:, ::step, None], filled, features)
        tapped: torch.Tensor = features.flatten(0, 1)[taps]
        return tapped

    def _rows(self, convolutions: Any, frames: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [C, frames / 4, hidden], and which of them are behind a sound's end. There convolutions see nothing."""
        seen = frames[:, None]
        for block in (convolutions.conv_0, convolutions.conv_1):
            is_there = torch.arange(seen.shape[2], device=seen.device) < edges[:, None]
            seen = block(torch.where(is_there[:, None, :, None], seen, 0))
            edges = (edges - 1) // 2 + 1
        rows = convolutions.input_proj_linear(seen.permute(0, 2, 3, 1).flatten(2))
        return rows, torch.arange(seen.shape[2], device=seen.device) >= edges[:, None]
