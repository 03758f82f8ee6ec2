"""A conformer whose attention sees a few rows before each: Gemma 4's.

Two convolutions halve frames; so a chunk of them is a block of its attention.
"""

from __future__ import annotations

from typing import Any

import torch

from mllm_compile.model.towers.sound_rows import FILLING, convolve_within, sounds_of_rows
from mllm_compile.model.towers.sound_windows import check_sizes
from mllm_compile.runtime.media.conformers import ConformerTower


class LocalConformer(torch.nn.Module):
    """A model's tower, and its way to the text's width."""

    def __init__(self, base: Any, facts: ConformerTower) -> None:
        super().__init__()
        self.base, self.facts = base, facts

    def forward(
        self, pixel_values: torch.Tensor, sounds: torch.Tensor, edges: torch.Tensor, taps: torch.Tensor
    ) -> torch.Tensor:
        check_sizes(pixel_values, taps)
        tower = self.base.audio_tower
        hidden, edges = self._rows(pixel_values.view(-1, self.facts.frames, self.facts.bins), sounds, edges)
        own = sounds_of_rows(sounds, edges, hidden.shape[1])
        hidden, mask = hidden.flatten(0, 1), ~_seen(own, tower.config)[None, None]
        places = tower.rel_pos_enc(hidden)
        for layer in tower.layers:
            hidden = _layer(layer, hidden, places, mask, own.flatten())
        features: torch.Tensor = self.base.embed_audio(inputs_embeds=tower.output_proj(hidden[taps]))
        return features

    def _rows(
        self, frames: torch.Tensor, sounds: torch.Tensor, edges: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [C, frames / 4, hidden] of chunks [C, frames, bins], and how many of each chunk's are the sound's."""
        convolutions = self.base.audio_tower.subsample_conv_projection
        before = torch.cat([sounds[:1] - 1, sounds[:-1]])
        follows = (before == sounds)[:, None, None, None]
        seen = frames[:, None]
        for layer in (convolutions.layer0, convolutions.layer1):
            is_there = torch.arange(seen.shape[2], device=seen.device) < edges[:, None]
            seen = torch.where(is_there[:, None, :, None], seen, 0)
            last = torch.cat([torch.zeros_like(seen[:1, :, -1:]), seen[:-1, :, -1:]])
            seen = torch.cat([torch.where(follows, last, 0), seen], 2)
            seen = torch.nn.functional.conv2d(seen, layer.conv.weight, stride=2, padding=(0, 1))
            seen = layer.act(layer.norm(seen.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
            edges = (edges - 1) // 2 + 1
        return convolutions.input_proj_linear(seen.permute(0, 2, 3, 1).flatten(2)), edges


def _seen(own: torch.Tensor, config: Any) -> torch.Tensor:
    """Where a row sees another [C, rows, context], of the rows around its chunk, by the sounds [C, rows] of rows."""
    chunks, rows = own.shape
    past, future = config.attention_context_left - 1, config.attention_context_right
    around = torch.nn.functional.pad(own.flatten(), (past, future), value=FILLING - 1)
    first = rows * torch.arange(chunks, device=own.device)
    offsets = torch.arange(past + rows + future, device=own.device)
    others = around[first[:, None] + offsets]
    distance = torch.arange(rows, device=own.device)[:, None] - (offsets - past)
    is_near = ((distance >= 0) & (distance < past)) | ((distance < 0) & (-distance < future))
    seen: torch.Tensor = (own[:, :, None] == others[:, None]) & is_near
    return seen


def _layer(
    layer: Any, hidden: torch.Tensor, places: torch.Tensor, mask: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """The layer of rows [R, hidden], as Gemma4AudioLayer computes it."""
    bound = min(layer.gradient_clipping, torch.finfo(layer.norm_pre_attn.weight.dtype).max)
    hidden = layer.feed_forward1(hidden)
    seen = layer.norm_pre_attn(hidden.clamp(-bound, bound))
    seen = layer.self_attn(seen[None], position_embeddings=places, attention_mask=mask)[0][0]
    hidden = layer.norm_post_attn(seen.clamp(-bound, bound)) + hidden
    hidden = layer.feed_forward2(_convolved(layer.lconv1d, hidden, own))
    normed: torch.Tensor = layer.norm_out(hidden.clamp(-bound, bound))
    return normed


def _convolved(block: Any, hidden: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The block with a convolution, as Gemma4AudioLightConv1d computes it."""
    bound = min(block.gradient_clipping, torch.finfo(hidden.dtype).max)
    seen = torch.nn.functional.glu(block.linear_start(block.pre_layer_norm(hidden)), dim=-1)
    convolution = block.depthwise_conv1d
    seen = convolve_within(seen, convolution.weight, convolution.kernel_size[0] - 1, own)
    seen = block.act_fn(block.conv_norm(seen.clamp(-bound, bound)))
    convolved: torch.Tensor = block.linear_end(seen) + hidden
    return convolved
