"""A conformer whose attention is within blocks, with a bias by distance: Phi-4-multimodal's.

A chunk is a block. The model's own forward fills up the last block of a sound of several, and attends to the filling;
a sound of one block has none. Three convolutions see over the ends of blocks, its layers do not.
"""

from __future__ import annotations

from typing import Any

import torch

from mllm_compile.model.towers.sound_rows import FILLING, sounds_of_rows
from mllm_compile.model.towers.sound_windows import check_sizes
from mllm_compile.runtime.media.conformers import ConformerTower

ROWS = 500  # of a block: a number in the model's own forward


def speech_of(base: Any) -> Any:
    """The encoder of sounds of a model that keeps both towers beside its embeddings; None: it has none."""
    return getattr(getattr(getattr(base, "embed_tokens_extend", None), "audio_embed", None), "encoder", None)


class SpeechBlocks(torch.nn.Module):
    """A model's encoder, and its way to the text's width where there are no images."""

    def __init__(self, base: Any, facts: ConformerTower) -> None:
        super().__init__()
        self.embed, self.facts = base.embed_tokens_extend.audio_embed, facts

    def forward(
        self, pixel_values: torch.Tensor, sounds: torch.Tensor, edges: torch.Tensor, taps: torch.Tensor
    ) -> torch.Tensor:
        check_sizes(pixel_values, taps)
        encoder = self.embed.encoder
        frames = encoder.encoder_embedding(pixel_values.view(-1, self.facts.frames, self.facts.bins))
        number = torch.arange(sounds.shape[0], device=sounds.device)
        ahead = (number - 1).clamp(min=0)  # not a slice, whose C - 1 of 1 export would tell apart
        follows = (sounds[ahead] == sounds) & (number > 0)
        hidden, edges = _rows(encoder.embed, frames, (ahead, follows), edges)
        is_own = sounds_of_rows(sounds, edges, ROWS) != FILLING
        hidden = torch.where(is_own[:, :, None], hidden, 0)
        is_seen = is_own | (follows | follows.roll(-1))[:, None]  # the first follows none
        bias = encoder.relative_attention_bias_layer(hidden)
        mask = torch.where(is_seen[:, None, None], bias, torch.finfo(bias.dtype).min)
        for layer in encoder.encoders:
            hidden = layer(hidden, mask)
        features = self.embed.up_proj_for_speech(hidden.flatten(0, 1)[taps])
        projected: torch.Tensor = self.embed.down_proj_for_speech(torch.nn.functional.gelu(features))
        return projected


def _rows(
    embed: Any, frames: torch.Tensor, before: tuple[torch.Tensor, torch.Tensor], edges: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [C, ROWS, hidden] of chunks [C, frames, bins], and how many of each chunk's are the sound's.

    Args:
        before: [C] each, the chunk before each, and whether it is of the same sound.
    """
    ahead, follows = before[0], before[1][:, None, None, None]
    seen = frames[:, None]
    for layer in embed.conv:
        if getattr(layer, "stride", None) != (2, 2):
            seen = layer(seen)
            continue
        is_there = torch.arange(seen.shape[2], device=seen.device) < edges[:, None]
        seen = torch.where(is_there[:, None, :, None], seen, 0)
        seen = torch.cat([torch.where(follows, seen[:, :, -1:][ahead], 0), seen], 2)
        seen = torch.nn.functional.conv2d(seen, layer.weight, layer.bias, stride=2, padding=(0, 1), groups=layer.groups)
        edges = (edges - 1) // 2 + 1
    return embed.out(seen.transpose(1, 2).flatten(2)), edges
