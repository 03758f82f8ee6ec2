"""The protocol of towers that take a sound in short chunks: Qwen2.5-Omni's and Qwen3-Omni's thinker, and Qwen3-ASR.

A model has it if its base has an `audio_tower` with an `n_window`. Its own forward finds sizes in data. So its modules
are called in its order: convolutions on whole chunks, then rows of all chunks; some chunks attend to each other.
Where convolutions see nothing behind a sound's end, what is behind it is made zero before each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.adapter import TowerAdapter, placeholder_of, refusal, traced_tower
from mllm_compile.model.towers.segments_hook import packed, say_bounds
from mllm_compile.model.towers.sound_windows import check_sizes, said_masks, sample_inputs, sound_token
from mllm_compile.model.trace import Trace
from mllm_compile.runtime.media.sounds import Edges, SoundTower
from mllm_compile.runtime.media.tower import Grid

_FLAT = ("conv1", "conv2")  # along frames alone
_SQUARE = ("conv2d1", "conv2d2", "conv2d3")  # along bins and frames


class SoundChunks(TowerAdapter):
    """The adapter; see the module's header."""

    facts: SoundTower

    @classmethod
    def of(cls, hf_model: HFModel) -> SoundChunks | None:
        base: Any = getattr(hf_model.model, "model", None)
        tower: Any = getattr(base, "audio_tower", None)
        if not hasattr(tower, "n_window"):
            return None
        needed = ("positional_embedding", "layers", "ln_post", *_convolutions(tower))
        if missing := [part for part in needed if not hasattr(tower, part)]:
            raise refusal(f"its tower has no {missing[0]}", "sound")
        config, chunk = tower.config, 2 * tower.n_window
        is_flat, has_projector = hasattr(tower, "conv1"), hasattr(base, "multi_modal_projector")
        edges: Edges = "last" if is_flat else "given" if has_projector else "alone"
        facts = SoundTower(
            bins=config.num_mel_bins,
            frames=chunk,
            halvings=1 if is_flat else len(_SQUARE),
            merge=2 if is_flat else 1,
            window=1 if is_flat else getattr(tower, "n_window_infer", chunk) // chunk,
            edges=edges,
            feature_width=hf_model.sizes().hidden_size,
            image_token_id=placeholder_of(hf_model, sound_token(hf_model), "sound"),
        )
        if facts.rows_of(chunk) % facts.merge:
            raise refusal(f"its chunks of {chunk} frames leave {facts.rows_of(chunk)} rows, an odd number", "sound")
        return cls(hf_model, facts)

    def trace_tower(self, device: str) -> Trace:
        """Inputs as SoundTower.input_names, outputs [N, hidden]."""
        base: Any = self.hf_model.model.model
        inputs = sample_inputs(self.facts, self.hf_model.model.dtype, device)
        with packed(base.audio_tower):
            return traced_tower(self.hf_model, _Tower(base, self.facts), inputs, device)

    def said_of(self, images: Sequence[tuple[torch.Tensor, Grid]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        facts = self.facts
        most = max(grid[0] for _, grid in images)
        padded = torch.zeros(len(images), facts.bins, most * facts.frames)
        for place, (pixels, grid) in zip(padded, images, strict=True):
            whole = pixels.view(grid[0], facts.bins, facts.frames).transpose(0, 1).flatten(1)
            place[:, : whole.shape[1]] = whole
        lengths = torch.tensor([(grid[0] - 1) * facts.frames + grid[1] for _, grid in images])
        mask = (torch.arange(padded.shape[2]) < lengths[:, None]).long().to(ids.device)
        return {"input_features": padded.to(ids.device), **said_masks(self.hf_model.model, mask)}


def _convolutions(tower: Any) -> tuple[str, ...]:
    return _FLAT if hasattr(tower, "conv1") else (*_SQUARE, "conv_out")


class _Tower(torch.nn.Module):
    def __init__(self, base: Any, facts: SoundTower) -> None:
        super().__init__()
        self.base, self.facts = base, facts

    def forward(
        self,
        pixel_values: torch.Tensor,
        cu_seqlens: torch.Tensor,
        taps: torch.Tensor,
        edges: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_sizes(pixel_values, taps)
        say_bounds(cu_seqlens)
        tower, facts = self.base.audio_tower, self.facts
        rows = self._rows(pixel_values.view(-1, facts.bins, facts.frames), edges)
        places = tower.positional_embedding.positional_embedding[: rows.shape[1]].to(rows.dtype)
        hidden = (rows + places).flatten(0, 1)
        for layer in tower.layers:
            made = layer(hidden, cu_seqlens, max_seqlen=1)
            hidden = made[0] if isinstance(made, tuple) else made
        if facts.merge > 1:
            hidden = hidden.unflatten(0, (-1, facts.merge)).mean(1)
        hidden = hidden[taps]
        hidden = tower.ln_post(hidden)
        features: torch.Tensor
        if hasattr(self.base, "multi_modal_projector"):
            features = self.base.multi_modal_projector(hidden)
        elif hasattr(tower, "proj1"):
            features = tower.proj2(tower.act(tower.proj1(hidden)))
        else:
            features = tower.proj(hidden)
        return features

    def _rows(self, frames: torch.Tensor, edges: torch.Tensor | None) -> torch.Tensor:
        """Convolves chunks [C, bins, frames]; returns their rows [C, rows, hidden]."""
        tower = self.base.audio_tower
        is_flat = hasattr(tower, "conv1")
        seen = frames if is_flat else frames[:, None]
        for name in _FLAT if is_flat else _SQUARE:
            convolution = getattr(tower, name)
            if edges is not None:
                is_there = torch.arange(seen.shape[-1], device=seen.device) < edges[:, None]
                seen = seen * is_there.to(seen.dtype).view(-1, *(1,) * (seen.dim() - 2), seen.shape[-1])
                edges = (edges - 1) // convolution.stride[-1] + 1
            seen = torch.nn.functional.gelu(convolution(seen))
        if is_flat:
            return seen.transpose(1, 2)
        rows: torch.Tensor = tower.conv_out(seen.permute(0, 3, 1, 2).flatten(2))
        return rows
