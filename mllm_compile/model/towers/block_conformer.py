"""A conformer whose attention is within blocks, with queries of windows behind it: Granite Speech's.

A chunk has whole blocks and whole windows.
"""

from __future__ import annotations

from typing import Any

import torch

from mllm_compile.model.towers.sound_rows import FILLING, convolve_within, sounds_of_rows
from mllm_compile.model.towers.sound_windows import check_sizes
from mllm_compile.runtime.media.conformers import ConformerTower


class BlockConformer(torch.nn.Module):
    """A model's encoder, and its projector."""

    def __init__(self, base: Any, facts: ConformerTower) -> None:
        super().__init__()
        self.base, self.facts = base, facts

    def forward(
        self, pixel_values: torch.Tensor, sounds: torch.Tensor, edges: torch.Tensor, taps: torch.Tensor
    ) -> torch.Tensor:
        check_sizes(pixel_values, taps)
        encoder, projector, facts = self.base.encoder, self.base.projector, self.facts
        own = sounds_of_rows(sounds, edges, facts.frames).flatten()
        further = getattr(encoder.config, "cat_hidden_layers", None) or ()
        hidden = encoder.input_linear(pixel_values.view(-1, facts.bins))
        states = [hidden]
        for number, layer in enumerate(encoder.layers, start=1):
            hidden = _layer(layer, hidden, encoder.attention_dists, own)
            if number == encoder.num_layers // 2:
                hidden = hidden + encoder.out_mid(encoder.out(hidden).softmax(-1))
            states.append(hidden)
        hidden = torch.cat([*(states[number] for number in sorted(set(further))), hidden], -1)
        hidden = torch.where((own != FILLING)[:, None], hidden, 0).unflatten(0, (-1, facts.merge))
        queried = projector.qformer(
            query_embeds=projector.query, encoder_hidden_states=hidden, encoder_attention_mask=None, return_dict=True
        ).last_hidden_state
        features: torch.Tensor = projector.linear(queried.flatten(0, 1)[taps])
        return features


def _layer(layer: Any, hidden: torch.Tensor, distances: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The layer of rows [R, hidden], as GraniteSpeechConformerBlock computes it."""
    hidden = 0.5 * layer.ff1(hidden) + hidden
    hidden = _attended(layer.attn, hidden, distances, own) + hidden
    hidden = _convolved(layer.conv, hidden, own) + hidden
    hidden = 0.5 * layer.ff2(hidden) + hidden
    normed: torch.Tensor = layer.post_norm(hidden)
    return normed


def _attended(attention: Any, hidden: torch.Tensor, distances: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Attention within blocks, with Shaw's terms of distances; rows behind a sound's end are not seen."""
    blocks = attention.pre_norm(hidden).unflatten(0, (-1, attention.context_size))
    states = attention.to_q(blocks), *attention.to_kv(blocks).chunk(2, -1)
    q, k, v = (x.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for x in states)
    far = torch.einsum("bhcd,crd->bhcr", q, attention.rel_pos_emb(distances))
    scores = (q @ k.transpose(-1, -2) + far) * attention.scale
    is_filling = (own == FILLING).view(-1, 1, 1, attention.context_size)
    scores = scores.masked_fill(is_filling, torch.finfo(scores.dtype).min)
    attended: torch.Tensor = attention.to_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2).flatten(0, 1))
    return attended


def _convolved(block: Any, hidden: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The block with a convolution, as GraniteSpeechConformerConvModule computes it."""
    seen = block.glu(block.up_conv(block.norm(hidden).T[None]))
    convolution = block.depth_conv
    seen = convolve_within(seen[0].T, convolution.conv.weight, convolution.padding[0], own)
    convolved: torch.Tensor = block.down_conv(block.silu(block.batch_norm(seen.T[None])))[0].T
    return convolved
