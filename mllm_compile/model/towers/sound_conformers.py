"""The protocol of conformers, which take a sound whole: Gemma 4's, Granite Speech's and Phi-4-multimodal's.

Their forwards pad a batch of sounds. Here sounds are in one row, each from the beginning of a chunk, and the modules
are called in their order; what sees neighbours (convolutions, attention) is told which rows are of one sound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.adapter import TowerAdapter, placeholder_of, refusal, traced_tower
from mllm_compile.model.towers.block_conformer import BlockConformer
from mllm_compile.model.towers.local_conformer import LocalConformer
from mllm_compile.model.towers.masked_hook import attending_by_masks
from mllm_compile.model.towers.segments_hook import attending_by
from mllm_compile.model.towers.sound_windows import SAMPLE_CHUNKS, SAMPLE_FEATURES, said_masks, sound_token
from mllm_compile.model.towers.speech_blocks import ROWS, SpeechBlocks, speech_of
from mllm_compile.model.trace import Trace, sized
from mllm_compile.runtime.media.conformers import ConformerTower
from mllm_compile.runtime.media.tower import Grid


class SoundConformers(TowerAdapter):
    """The adapter; see the module's header."""

    attends_by_itself = True
    facts: ConformerTower

    @classmethod
    def of(cls, hf_model: HFModel) -> SoundConformers | None:
        base: Any = getattr(hf_model.model, "model", None)
        if hasattr(getattr(base, "audio_tower", None), "subsample_conv_projection") and hasattr(base, "embed_audio"):
            facts = _local(hf_model, base.audio_tower)
        elif hasattr(getattr(base, "encoder", None), "attention_dists") and hasattr(base, "projector"):
            facts = _of_blocks(hf_model, base)
        elif hasattr(speech_of(base), "relative_attention_bias_layer"):
            facts = _of_speech(hf_model, speech_of(base))
        else:
            return None
        adapter = cls(hf_model, facts)
        adapter.has_adapter_apart = speech_of(base) is not None
        return adapter

    def trace_tower(self, device: str) -> Trace:
        """Inputs as ConformerTower.input_names, outputs [N, hidden]."""
        facts, base = self.facts, self.hf_model.model.model
        inputs = {
            "pixel_values": sized("F", (SAMPLE_CHUNKS, facts.pixel_width), self.hf_model.model.dtype, device),
            "sounds": sized("F", (SAMPLE_CHUNKS,), torch.int64, device),
            "edges": sized("F", (SAMPLE_CHUNKS,), torch.int64, device),
            "taps": sized("N", (SAMPLE_FEATURES,), torch.int64, device),
        }
        if speech_of(base) is not None:
            with attending_by_masks(speech_of(base)):
                return traced_tower(self.hf_model, SpeechBlocks(base, facts), inputs, device)
        form: Any = LocalConformer if facts.is_masked else BlockConformer
        with attending_by(base, "eager"):
            return traced_tower(self.hf_model, form(base, facts), inputs, device)

    def said_of(self, images: Sequence[tuple[torch.Tensor, Grid]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        facts = self.facts
        lengths = torch.tensor([(grid[0] - 1) * facts.frames + grid[1] for _, grid in images])
        frames = torch.zeros(len(images), int(lengths.max()), facts.bins)
        for place, (pixels, _), length in zip(frames, images, lengths.tolist(), strict=True):
            place[:length] = pixels.view(-1, facts.bins)[:length]
        if speech_of(self.hf_model.model.model) is not None:
            sizes = torch.tensor([facts.num_features(grid) for _, grid in images])
            return {"audio_input_features": frames.to(ids.device), "audio_embed_sizes": sizes}
        said = {"input_features": frames.to(ids.device)}
        if not facts.is_masked:
            return said
        mask = torch.arange(frames.shape[1]) < lengths[:, None]
        return said | said_masks(self.hf_model.model, mask.to(ids.device))


def _local(hf_model: HFModel, tower: Any) -> ConformerTower:
    convolutions = tower.subsample_conv_projection
    return ConformerTower(
        bins=4 * convolutions.input_proj_linear.in_features // convolutions.layer1.conv.out_channels,
        frames=4 * tower.config.attention_chunk_size,
        halvings=2,
        window=1,
        edges="last",
        feature_width=hf_model.sizes().hidden_size,
        image_token_id=placeholder_of(hf_model, sound_token(hf_model), "sound"),
    )


def _of_blocks(hf_model: HFModel, base: Any) -> ConformerTower:
    config, encoder = hf_model.model.config, base.encoder.config
    if config.window_size % config.downsample_rate:
        raise refusal(f"its windows of {config.window_size} rows are no multiple of {config.downsample_rate}", "sound")
    return ConformerTower(
        bins=encoder.input_dim,
        frames=math.lcm(encoder.context_size, config.window_size),
        halvings=0,
        merge=config.window_size,
        of_group=config.window_size // config.downsample_rate,
        is_masked=False,
        window=1,
        edges="last",
        feature_width=hf_model.sizes().hidden_size,
        image_token_id=placeholder_of(hf_model, sound_token(hf_model), "sound"),
    )


def _of_speech(hf_model: HFModel, encoder: Any) -> ConformerTower:
    config = encoder.config
    halvings = int(math.log2(config.time_reduction))
    if config.time_reduction != 1 << halvings or config.downsample_rate != 1 or config.chunk_size > 0:
        raise refusal(
            f"its audio_config says time_reduction {config.time_reduction}, downsample_rate {config.downsample_rate} "
            f"and chunk_size {config.chunk_size}; expected a power of two, 1 and none",
            "sound",
        )
    return ConformerTower(
        bins=config.input_size,
        frames=ROWS << halvings,
        halvings=halvings,
        is_masked=False,
        sampled=20 << halvings,
        window=1,
        edges="last",
        feature_width=hf_model.sizes().hidden_size,
        image_token_id=placeholder_of(hf_model, sound_token(hf_model), "sound"),
    )
