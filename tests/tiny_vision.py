"""Tiny models that take images, with random weights: their folders, prompts with images, and Transformers' answers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mllm_compile.config.schema import EngineConfig
from mllm_compile.media.prompt import MediaItem, MediaPrompt
from mllm_compile.runtime.media.crops import CropTower
from mllm_compile.runtime.media.tower import Grid

IMAGE_TOKEN, VIDEO_TOKEN = 90, 91
ROW_END = 94
MERGE = 2
PATCH_WIDTH = 96
TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PATCHES = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "in_channels": 3}
_TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
_TOKENS |= {"vision_start_token_id": 92, "vision_end_token_id": 93}
PLACEHOLDERS = frozenset((IMAGE_TOKEN, VIDEO_TOKEN))
# By model type: the text's config, and the tower's.
VISION_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({"rope_parameters": _ROPE}, {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
    "qwen2_5_vl": (
        {"rope_parameters": _ROPE},
        {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
            "tokens_per_second": 2,
        },
    ),
    "qwen3_vl": (
        {"rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
}


# Towers of whole images, 16 or 64 patches each; vocabulary and text as above.
IMAGE = (3, 32, 32)
MOST_PLACES = 80 * MERGE**2
PACKED_STEP = 8  # pixels a feature has on a side, of towers that pack
_LLAMA = {**TEXT, "model_type": "llama"}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE[1],
    "patch_size": 8,
    "num_channels": IMAGE[0],
}
IMAGE_MODELS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": _LLAMA,
        "vision_config": {**_SIGLIP, "model_type": "clip_vision_model", "num_hidden_layers": 3},
        "image_seq_length": 16,
    },
    "gemma3": {
        "text_config": {
            **TEXT,
            "model_type": "gemma3_text",
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model", "patch_size": 4},
        "mm_tokens_per_image": 16,
        "boi_token_index": 92,
        "eoi_token_index": 93,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**_SIGLIP, "image_size": [32, 32], "patch_size": [4, 4]},
        "image_seq_length": 16,
    },
    "idefics3": {"text_config": _LLAMA, "vision_config": {**_SIGLIP, "patch_size": 4}, "scale_factor": 2},
    "smolvlm": {"text_config": _LLAMA, "vision_config": {**_SIGLIP, "patch_size": 4}, "scale_factor": 2},
}
FEATURES = 16  # of an image
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": PACKED_STEP // MERGE,
    "num_channels": IMAGE[0],
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}
# Towers that pack patches of whole images; as many features an image of a size in both.
PACKED_MODELS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": _PIXTRAL,
        "spatial_merge_size": MERGE,
        "vision_feature_layer": -1,
    },
    "llava_of_pixtral": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**_PIXTRAL, "patch_size": PACKED_STEP},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
}
# Towers of crops, 4 patches each.
_CROPS = {**_SIGLIP, "patch_size": 16}
CROP_MODELS: dict[str, dict[str, Any]] = {
    "llava_next": {
        "text_config": _LLAMA,
        "vision_config": {**_CROPS, "model_type": "clip_vision_model", "num_hidden_layers": 3},
        "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]],
    },
    "llava_onevision": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**_CROPS, "model_type": "siglip_vision_model"},
        "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]],
        "vision_aspect_ratio": "anyres_max_1",
        "video_token_id": VIDEO_TOKEN,
    },
}
# Towers of patches with places, 4 of a feature.
PLACED_MODELS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "text_config": {
            **TEXT,
            "model_type": "gemma4_text",
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": MERGE,
            "position_embedding_size": 64,
            "standardize": True,
        },
        "audio_config": None,
        "video_token_id": VIDEO_TOKEN,
        "audio_token_id": VIDEO_TOKEN,
    },
}
VISION_MODELS["glm4v"] = (
    {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}, "model_type": "glm4v_text"},
    {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "image_size": 20,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    },
)
VISION_MODELS["qwen3_5"] = (  # with states in two layers of three
    {
        "rope_parameters": {**_ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
    },
)
_OF_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION_MODELS["qwen4_exp"] = (  # which hashes token ids in its first layer, those of places too
    {
        **VISION_MODELS["qwen3_5"][0],
        **_OF_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 256,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 1024,
        "indexer_compress_ratio": 4,
    },
    VISION_MODELS["qwen3_5"][1],
)
VISION_MODELS["qwen3_vl_moe"] = (
    {**VISION_MODELS["qwen3_vl"][0], **_OF_EXPERTS},
    VISION_MODELS["qwen3_vl"][1],
)
# Of a size that the kernels of GPUs take: heads of 64, and towers' heads of 80 or 72, as in large models. Features of a
# feed-forward are no multiple of 8. Of few layers, which take a GPU's tests less time.
_WIDE_TEXT = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 2}
_WIDE_TOWERS = {
    "qwen2_vl": {"embed_dim": 160, "hidden_size": 256},
    "qwen2_5_vl": {"hidden_size": 160, "intermediate_size": 1020, "out_hidden_size": 256},
    "qwen3_vl": {"hidden_size": 144, "out_hidden_size": 256},
    "glm4v": {"hidden_size": 160, "out_hidden_size": 256},
}


def vision_config(model_type: str, wide: bool = False) -> Any:
    """Transformers' config of a tiny model."""
    from transformers import AutoConfig

    if model_type in (of_images := IMAGE_MODELS | PACKED_MODELS | CROP_MODELS | PLACED_MODELS):
        said = dict(of_images[model_type])
        if wide:
            of_heads = {"head_dim": 128, "global_head_dim": 128}  # as many have
            tower = said["vision_config"] | {"hidden_size": 144}
            said |= {
                "text_config": _widened(said["text_config"]) | of_heads,
                "vision_config": tower | ({"head_dim": 72} if "head_dim" in tower else {}),
            }
        return AutoConfig.for_model(model_type.partition("_of_")[0], **said, image_token_id=IMAGE_TOKEN)
    text, tower = VISION_MODELS[model_type]
    if wide:
        rope = {**text["rope_parameters"], "mrope_section": [8, 12, 12]}
        text, tower = _widened(text) | {"rope_parameters": rope}, {**tower, **_WIDE_TOWERS[model_type]}
    return AutoConfig.for_model(
        model_type, text_config={**TEXT, **text}, vision_config={**_PATCHES, **tower}, **_TOKENS
    )


def _widened(text: dict[str, Any]) -> dict[str, Any]:
    kinds = {"layer_types": text["layer_types"][: _WIDE_TEXT["num_hidden_layers"]]} if "layer_types" in text else {}
    return {**text, **_WIDE_TEXT, **kinds}


def save_vision_model(model_type: str, folder: Path, wide: bool = False, **text: Any) -> Any:
    """Writes a tiny model in float32, whose attention is far from uniform; returns it.

    Args:
        text: changes of the text's config.
    """
    from transformers import AutoModelForImageTextToText

    config = vision_config(model_type, wide)
    for name, value in text.items():
        setattr(config.text_config, name, value)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
        if (head := model.get_output_embeddings().weight) is model.get_input_embeddings().weight:
            head.mul_(0.1)  # or each token would answer with itself
        # Never a placeholder: Transformers would look for one more image.
        model.get_output_embeddings().weight[sorted(PLACEHOLDERS)] = 0
    model.save_pretrained(folder)
    return model


def vision_engine_config(folder: Path, cache: Path, backend: str = "eager", **runtime: Any) -> EngineConfig:
    """The model in float32 on a CPU, with steps of few tokens."""
    limits = {"max_model_len": 256, "max_running_requests": 8, "max_num_batched_tokens": 64, "page_size": 16}
    return EngineConfig.from_dict(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "compile": {"backend": backend},
            "runtime": {"device": "cpu", **limits, **runtime},
            "cache": {"dir": str(cache)},
        }
    )


def image(seed: int, grid: Grid) -> tuple[np.ndarray, Grid]:
    """Random patches."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(grid[0] * grid[1] * grid[2], PATCH_WIDTH, generator=generator).numpy(), grid


def picture(seed: int) -> np.ndarray:
    """A random image, [1, channels, rows, columns]."""
    return torch.randn(1, *IMAGE, generator=torch.Generator().manual_seed(seed)).numpy()


@dataclass(frozen=True)
class OfRows:
    """A random image of so many rows and columns of features, which are ended by tokens of their own."""

    seed: int
    rows: int
    columns: int


@dataclass(frozen=True)
class OfPlaces:
    """A random image of so many rows and columns of features, whose patches say where they are, in no order, among
    others that are padding."""

    seed: int
    rows: int
    columns: int


def _of_places(part: OfPlaces) -> tuple[list[int], dict[str, np.ndarray], np.ndarray]:
    count, width = part.rows * part.columns * MERGE**2, 3 * 4**2
    generator = torch.Generator().manual_seed(part.seed)
    pixels = torch.rand(1, MOST_PLACES, width, generator=generator).numpy()
    rows, columns = part.rows * MERGE, part.columns * MERGE
    places = np.full((1, MOST_PLACES, 2), -1)
    places[0, :count] = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
    return [IMAGE_TOKEN] * (count // MERGE**2), {"pixel_values": pixels, "image_position_ids": places}, pixels


@dataclass(frozen=True)
class OfSize:
    """A random image of so many rows and columns of pixels, in as many crops as a model's pinpoints ask for."""

    seed: int
    height: int
    width: int
    tower: CropTower


def crop_tower(model_type: str) -> CropTower:
    """Facts of a tiny model of CROP_MODELS."""
    said = CROP_MODELS[model_type]
    return CropTower(
        feature_width=TEXT["hidden_size"],
        image_token_id=IMAGE_TOKEN,
        video_token_id=said.get("video_token_id", -1),
        shape=IMAGE,
        features=(IMAGE[1] // _CROPS["patch_size"]) ** 2,
        rows=1,
        pinpoints=tuple(map(tuple, said["image_grid_pinpoints"])),
        most_crops=int(said.get("vision_aspect_ratio", "0").removeprefix("anyres_max_")),
    )


def _of_size(part: OfSize) -> tuple[list[int], dict[str, np.ndarray], np.ndarray]:
    count = 1 + math.prod(part.tower.crops(part.height, part.width))
    generator = torch.Generator().manual_seed(part.seed)
    pixels = torch.randn(1, count, *IMAGE, generator=generator).numpy()
    # As many as Transformers' forward expects, or it raises.
    ids = [IMAGE_TOKEN] * part.tower.num_features((count, part.height, part.width))
    return ids, {"pixel_values": pixels, "image_sizes": np.array([[part.height, part.width]])}, pixels


def _of_rows(part: OfRows) -> tuple[list[int], dict[str, np.ndarray], np.ndarray]:
    height, width = part.rows * PACKED_STEP, part.columns * PACKED_STEP
    generator = torch.Generator().manual_seed(part.seed)
    pixels = torch.randn(1, IMAGE[0], height, width, generator=generator).numpy()
    ids = ([IMAGE_TOKEN] * part.columns + [ROW_END]) * part.rows
    return ids[:-1], {"pixel_values": pixels, "image_sizes": np.array([[height, width]])}, pixels


Shown = tuple[np.ndarray, Grid] | np.ndarray | OfRows | OfSize | OfPlaces


def media_prompt(*parts: Sequence[int] | Shown) -> MediaPrompt:
    """A prompt of token ids and images (images, or patches with grids), in order, as a processor makes it."""
    ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, tuple):
            pixels, grid = part
            count, tensors = len(pixels) // MERGE**2, {"pixel_values": pixels, "image_grid_thw": np.array([grid])}
        elif type(part) in (makers := {OfRows: _of_rows, OfSize: _of_size, OfPlaces: _of_places}):
            own, tensors, pixels = makers[type(part)](part)
            items.append(MediaItem("image", len(ids), len(own), hashlib.sha256(pixels.tobytes()).digest(), tensors))
            ids += own
            continue
        elif isinstance(part, np.ndarray):
            pixels, count, tensors = part, FEATURES, {"pixel_values": part}
        else:
            ids += part
            continue
        items.append(MediaItem("image", len(ids), count, hashlib.sha256(pixels.tobytes()).digest(), tensors))
        ids += [IMAGE_TOKEN] * count
    return MediaPrompt(ids, tuple(items), np.array(ids) == IMAGE_TOKEN)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The arrays of images one after another; images of different sizes padded, as processors do."""
    if arrays[0].ndim <= len(IMAGE):
        return np.concatenate(arrays)
    most = np.max([array.shape for array in arrays], axis=0)
    return np.concatenate([np.pad(a, [(0, 0), *((0, n) for n in (most - a.shape)[1:])]) for a in arrays])


def _said(model: Any, prompt: MediaPrompt | list[int], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments of Transformers' forward beside `tokens`, for a prompt and its answer."""
    if isinstance(prompt, list):
        return {}
    names = prompt.items[0].tensors
    arrays = {name: _joined([item.tensors[name] for item in prompt.items]) for name in names}
    said = {name: torch.from_numpy(array).to(tokens.device) for name, array in arrays.items()}
    kind, is_image = model.config.model_type, (tokens == IMAGE_TOKEN).long()
    if kind in ("idefics3", "smolvlm"):
        said["pixel_values"] = said["pixel_values"][None]
    if kind == "gemma3":
        said["token_type_ids"] = is_image
    elif kind not in (*IMAGE_MODELS, *PACKED_MODELS, *CROP_MODELS):  # gemma4 among them
        said["mm_token_type_ids"] = is_image
    return said


@torch.no_grad()
def transformers_logprobs(model: Any, prompt: MediaPrompt | list[int], answer: Sequence[int] = ()) -> torch.Tensor:
    """[n - 1] log-probability of each token of prompt and answer but the first, by Transformers' forward."""
    ids = list(prompt) if isinstance(prompt, list) else list(prompt.prompt_token_ids)
    tokens = torch.tensor([ids + list(answer)], device=model.device)
    logits = model(input_ids=tokens, use_cache=False, **_said(model, prompt, tokens)).logits[0]
    scores = torch.log_softmax(logits.double(), -1)[:-1]
    return scores.gather(1, tokens[0, 1:, None])[:, 0].cpu()


@torch.no_grad()
def transformers_greedy(model: Any, prompt: MediaPrompt | list[int], max_tokens: int) -> list[int]:
    """The tokens that Transformers' forward chooses, the whole text anew for each."""
    ids = list(prompt) if isinstance(prompt, list) else list(prompt.prompt_token_ids)
    answer: list[int] = []
    for _ in range(max_tokens):
        tokens = torch.tensor([ids + answer])
        said = _said(model, prompt, tokens)
        answer.append(int(model(input_ids=tokens, use_cache=False, **said).logits[0, -1].argmax()))
    return answer
