"""Tiny models that take sounds, with random weights: their folders, prompts with sounds, and Transformers' answers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mllm_compile.media.prompt import MediaItem, MediaPrompt
from tests import stand_in_timm
from tests.tiny_vision import PLACED_MODELS, TEXT, OfPlaces, media_prompt

SOUND_TOKEN, IMAGE_TOKEN = 88, 90
BINS, FRAMES = 8, 48  # of a window
CHUNK = 100  # frames, of which Qwen3's code makes 13 rows
_WHISPER = {
    "num_mel_bins": BINS,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "max_source_positions": FRAMES // 2,
}
_AS_LLAMA = {
    "num_mel_bins": BINS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,  # of four rows, which make a feature
    "max_position_embeddings": FRAMES // 2,
    "max_source_positions": FRAMES // 2,
}
# Towers of whole windows.
WINDOW_MODELS: dict[str, dict[str, Any]] = {
    "qwen2_audio": {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": _WHISPER},
    "voxtral": {"text_config": {**TEXT, "model_type": "llama"}, "audio_config": _AS_LLAMA},
    "audioflamingo3": {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": _WHISPER},
    "glmasr": {"text_config": {**TEXT, "model_type": "llama"}, "audio_config": _AS_LLAMA},
}
# Towers of short chunks, of which two attend to each other in Qwen3's; Omni's beside a tower of images.
_CHUNKS = {**_WHISPER, "max_source_positions": 64, "n_window": CHUNK // 2, "output_dim": 64}
_CHUNKS_TOO = {**_CHUNKS, "n_window_infer": 2 * CHUNK, "downsample_hidden_size": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PATCHES = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OMNI = {"image_token_id": IMAGE_TOKEN, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
_OMNI |= {"audio_start_token_id": 86, "audio_end_token_id": 87}
CHUNK_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_asr": {
        "text_config": {**TEXT, "model_type": "qwen3"},
        "audio_config": {**_CHUNKS_TOO, "max_position_embeddings": 16},
    },
    "qwen2_5_omni_thinker": {
        "text_config": {**TEXT, "rope_parameters": _ROPE},
        "audio_config": _CHUNKS,
        "vision_config": {**_PATCHES, "window_size": 16, "fullatt_block_indexes": [1]},
        **_OMNI,
    },
    "qwen3_omni_moe_thinker": {
        "text_config": {**TEXT, **_EXPERTS, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        "audio_config": _CHUNKS_TOO,
        "vision_config": {**_PATCHES, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **_OMNI,
    },
}
# Conformers: Gemma 4's beside a tower of images, whose blocks are of 4 rows and chunks of 16 frames; Granite Speech's,
# whose blocks are of 6 rows and windows of 4, three features each.
_GEMMA = PLACED_MODELS["gemma4"]
CONFORMER_BINS = 16
_GRANITE: dict[str, Any] = {
    "text_config": {**TEXT, "model_type": "granite"},
    "encoder_config": {
        "input_dim": CONFORMER_BINS,
        "num_layers": 3,
        "hidden_dim": 32,
        "feedforward_mult": 2,
        "num_heads": 2,
        "output_dim": 12,
        "context_size": 6,
        "max_pos_emb": 8,
        "conv_kernel_size": 5,
    },
    "projector_config": {
        "model_type": "blip_2_qformer",
        "hidden_size": 32,
        "encoder_hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    },
    "window_size": 4,
    "downsample_rate": 2,
    "has_lora_adapter": False,
    "tie_word_embeddings": False,
}
_PLUS = {
    **_GRANITE,
    "encoder_config": {**_GRANITE["encoder_config"], "cat_hidden_layers": [0, 1]},
    "projector_config": {**_GRANITE["projector_config"], "encoder_hidden_size": 96},
}
CONFORMER_MODELS: dict[str, dict[str, Any]] = {
    "gemma4": {
        **_GEMMA,
        "audio_config": {
            "model_type": "gemma4_audio",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [CONFORMER_BINS, 4],
            "conv_kernel_size": 3,
            "attention_chunk_size": 4,
            "attention_context_left": 5,
            "output_proj_dims": 24,
        },
        "image_token_id": IMAGE_TOKEN,
    },
    "granite_speech": _GRANITE,
    "granite_speech_plus": _PLUS,
}
CLIP_FEATURES = 16  # of a sound, each of 16 frames
# Some tokens are rows of tables beside the towers, whose images are by a stand-in for timm.
CLIP_MODELS: dict[str, dict[str, Any]] = {
    "gemma3n": {
        "text_config": {
            **TEXT,
            "model_type": "gemma3n_text",
            "vocab_size_per_layer_input": 80,
            "hidden_size_per_layer_input": 8,
            "intermediate_size": [48] * 4,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "pad_token_id": 0,
        },
        "vision_config": {
            "model_type": "gemma3n_vision",
            "hidden_size": stand_in_timm.WIDTH,
            "vocab_size": 4,
            "vocab_offset": 88,
            "label_names": ["any"],  # or Transformers asks timm for them
        },
        "audio_config": {
            "model_type": "gemma3n_audio",
            "input_feat_size": CONFORMER_BINS,
            "hidden_size": 32,
            "vocab_size": 4,
            "vocab_offset": 92,
            "conf_num_hidden_layers": 2,
            "conf_num_attention_heads": 2,
            "conf_attention_chunk_size": 4,
            "conf_attention_context_left": 5,
            "conf_conv_kernel_size": 3,
            "sscp_conv_channel_size": [8, 4],
        },
        "audio_soft_tokens_per_image": CLIP_FEATURES,
        "vision_soft_tokens_per_image": stand_in_timm.PLACES,
        "image_token_id": IMAGE_TOKEN,
    },
}
SOUND_MODELS = WINDOW_MODELS | CHUNK_MODELS | CONFORMER_MODELS | CLIP_MODELS
OF_BOTH = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "gemma4", "gemma3n")  # sounds and images
_OF_OMNI = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
_FEATURES_OF_ROWS = {"glmasr": 4}


@dataclass(frozen=True)
class Patches:
    """A random image of so many patches, for Omni's towers."""

    seed: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Sound:
    """A random sound of so many frames."""

    seed: int
    frames: int


def sound_config(model_type: str) -> Any:
    """Transformers' config of a tiny model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **SOUND_MODELS[model_type] | {"audio_token_id": SOUND_TOKEN})


def save_sound_model(model_type: str, folder: Path) -> Any:
    """Writes a tiny model in float32, whose attention is far from uniform; returns it."""
    from mllm_compile.model.hf_model import auto_class

    config = sound_config(model_type)
    torch.manual_seed(0)
    model = auto_class(type(config)).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
        if (head := model.get_output_embeddings().weight) is model.get_input_embeddings().weight:
            head.mul_(0.1)  # or each token would answer with itself
        for name, buffer in model.named_buffers():
            if name.endswith(("put_min", "put_max")):  # what linears of Gemma 4 clip by
                buffer.fill_(-1.5 if name.endswith("min") else 1.5)
            if name.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 2)
        # Never a placeholder, or a mark of one: Transformers would look for one more sound.
        model.get_output_embeddings().weight[[SOUND_TOKEN, IMAGE_TOKEN, *range(86, 94)]] = 0
    model.save_pretrained(folder)
    return model


def chunk_of(kind: str) -> int:
    """Frames of a window or chunk of a model's tower."""
    if kind in CONFORMER_MODELS | CLIP_MODELS:
        return 12 if kind.startswith("granite") else 16
    return CHUNK if kind in CHUNK_MODELS else FRAMES


def _of_conformer(kind: str, part: Sound) -> tuple[int, dict[str, np.ndarray]]:
    """As _tensors; Gemma 4's have frames behind their end."""
    more = 3 if kind == "gemma4" else 0
    shape = 1, part.frames + more, CONFORMER_BINS
    given = torch.randn(*shape, generator=torch.Generator().manual_seed(part.seed)).numpy()
    if kind in CLIP_MODELS:
        return CLIP_FEATURES, {"input_features": given, "input_features_mask": np.ones(shape[:2], dtype=bool)}
    if kind != "gemma4":
        count = 2 * math.ceil(part.frames / 4)
        return count, {"input_features": given, "input_features_mask": np.ones((1, count), dtype=bool)}
    mask = np.arange(shape[1])[None] < part.frames
    return math.ceil(part.frames / 4), {"input_features": given * mask[..., None], "input_features_mask": mask}


def _tensors(kind: str, part: Sound) -> tuple[int, dict[str, np.ndarray]]:
    """A sound's features, and what a model's processor gives for it."""
    if kind in CONFORMER_MODELS | CLIP_MODELS:
        return _of_conformer(kind, part)
    whole = chunk_of(kind)
    windows = math.ceil(part.frames / whole)
    shape = windows, BINS, whole
    given = torch.randn(*shape, generator=torch.Generator().manual_seed(part.seed)).numpy()
    if kind == "voxtral":
        return windows * whole // 8, {"input_features": given}
    lengths = np.array([whole] * (windows - 1) + [part.frames - (windows - 1) * whole])
    mask = (np.arange(whole) < lengths[:, None]).astype(np.int64)
    if kind in CHUNK_MODELS:
        given, mask = np.ascontiguousarray(given.swapaxes(0, 1)).reshape(1, BINS, -1), mask.reshape(1, -1)
    if kind in _OF_OMNI:
        given, mask = given[..., : part.frames], mask[:, : part.frames]
    rows = (lengths - 1) // 2 + 1
    if kind in ("qwen3_asr", "qwen3_omni_moe_thinker"):
        count = int(((((rows - 1) // 2 + 1) - 1) // 2 + 1).sum())
    else:
        count = int((rows // _FEATURES_OF_ROWS.get(kind, 2)).sum())
    name = "feature_attention_mask" if kind in ("qwen2_audio", *_OF_OMNI) else "input_features_mask"
    return count, {"input_features": given, name: mask}


def sound_prompt(kind: str, *parts: Sequence[int] | Sound | Patches) -> MediaPrompt:
    """A prompt of token ids, sounds and images, in order, as a processor makes it."""
    ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, Patches) and kind == "gemma4":
            (item,) = media_prompt(OfPlaces(part.seed, part.rows // 2, part.columns // 2)).items
            items.append(replace(item, start=len(ids)))
            ids += [IMAGE_TOKEN] * item.length
            continue
        if isinstance(part, Patches) and kind == "gemma3n":
            side, count = stand_in_timm.SIDE, stand_in_timm.PLACES
            pixels = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(part.seed)).numpy()
            digest = hashlib.sha256(pixels.tobytes()).digest()
            items.append(MediaItem("image", len(ids), count, digest, {"pixel_values": pixels}))
            ids += [IMAGE_TOKEN] * count
            continue
        if isinstance(part, Patches):
            generator = torch.Generator().manual_seed(part.seed)
            pixels = torch.randn(part.rows * part.columns, 96, generator=generator).numpy()
            given = {"pixel_values": pixels, "image_grid_thw": np.array([[1, part.rows, part.columns]])}
            count = len(pixels) // 4
            items.append(MediaItem("image", len(ids), count, hashlib.sha256(pixels.tobytes()).digest(), given))
            ids += [IMAGE_TOKEN] * count
            continue
        if not isinstance(part, Sound):
            ids += part
            continue
        count, tensors = _tensors(kind, part)
        digest = hashlib.sha256(tensors["input_features"].tobytes() + part.frames.to_bytes(4, "little")).digest()
        items.append(MediaItem("audio", len(ids), count, digest, tensors))
        ids += [SOUND_TOKEN] * count
    return MediaPrompt(ids, tuple(items), np.isin(ids, (SOUND_TOKEN, IMAGE_TOKEN)))


def _said(prompt: MediaPrompt | list[int]) -> dict[str, torch.Tensor]:
    """Arguments of Transformers' forward beside tokens."""
    if isinstance(prompt, list):
        return {}
    found = {}
    for name in dict.fromkeys(name for item in prompt.items for name in item.tensors):
        arrays = [one.tensors[name] for one in prompt.items if name in one.tensors]
        if name.startswith(("pixel", "image")):
            found[name] = torch.from_numpy(np.concatenate(arrays))
            continue
        most = np.max([array.shape for array in arrays], axis=0)
        padded = [np.pad(a, [(0, 0)] + [(0, int(n)) for n in (most - a.shape)[1:]]) for a in arrays]
        found[name] = torch.from_numpy(np.concatenate(padded))
    return found


def _with_mask(said: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """With the mask of a text, without which Omni's forward counts positions of images on one axis; or with the kinds
    of tokens, by which Gemma 4's images see ahead."""
    if "image_position_ids" in said:
        return said | {"mm_token_type_ids": (tokens == IMAGE_TOKEN).long()}
    return said | ({"attention_mask": torch.ones_like(tokens)} if "image_grid_thw" in said else {})


@contextmanager
def _each_alone(model: Any, prompt: MediaPrompt | list[int]) -> Iterator[None]:
    """Within the context encoders take each sound by itself whose convolutions hear in a batch what fills them up:
    Granite Speech's, which is told of no ends, and Gemma 3n's."""
    sounds = [] if isinstance(prompt, list) else [item for item in prompt.items if item.kind == "audio"]
    is_clip = hasattr(getattr(model.model, "audio_tower", None), "conformer")
    if not sounds or not (is_clip or hasattr(model.model, "projector")):
        yield
        return
    encode = model.model.get_audio_features
    given = [torch.from_numpy(item.tensors["input_features"]) for item in sounds]

    def joined(input_features: torch.Tensor, *masks: Any, **kwargs: Any) -> Any:
        made = [
            encode(one, *(mask[:1, :1].expand(1, one.shape[1]) for mask in masks), return_dict=True) for one in given
        ]
        lengths = torch.tensor([one.pooler_output.shape[1] for one in made])
        is_there = torch.arange(int(lengths.max())) < lengths[:, None]
        at_places = made[0].pooler_output.new_zeros(*is_there.shape, made[0].pooler_output.shape[2])
        at_places[is_there] = torch.cat([one.pooler_output[0] for one in made])
        return SimpleNamespace(pooler_output=at_places, audio_mel_mask=~is_there)

    model.model.get_audio_features = joined
    try:
        yield
    finally:
        del model.model.get_audio_features


@torch.no_grad()
def transformers_logprobs(model: Any, prompt: MediaPrompt | list[int]) -> torch.Tensor:
    """[n - 1] log-probability of each token of the prompt but the first, by Transformers' forward."""
    ids = list(prompt) if isinstance(prompt, list) else list(prompt.prompt_token_ids)
    tokens = torch.tensor([ids])
    with _each_alone(model, prompt):
        logits = model(input_ids=tokens, use_cache=False, **_with_mask(_said(prompt), tokens)).logits[0]
    scores = torch.log_softmax(logits.double(), -1)
    return scores[:-1].gather(1, tokens[0, 1:, None])[:, 0]


@torch.no_grad()
def transformers_greedy(model: Any, prompt: MediaPrompt | list[int], max_tokens: int) -> list[int]:
    """The tokens that Transformers' forward chooses, the whole text anew for each."""
    ids = list(prompt) if isinstance(prompt, list) else list(prompt.prompt_token_ids)
    answer: list[int] = []
    for _ in range(max_tokens):
        tokens = torch.tensor([ids + answer])
        with _each_alone(model, prompt):
            logits = model(input_ids=tokens, use_cache=False, **_with_mask(_said(prompt), tokens)).logits[0, -1]
        answer.append(int(logits.argmax()))
    return answer
