"""Tiny models that take images, with random weights: their folders, prompts with images, and Transformers' answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mllm_compile.config.schema import EngineConfig
from mllm_compile.media.inputs import MediaItem, MediaPrompt
from mllm_compile.runtime.media.grids import Grid

IMAGE_TOKEN = 90
MERGE = 2
PATCH_WIDTH = 96
_TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PATCHES = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "in_channels": 3}
_TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
PLACEHOLDERS = frozenset((IMAGE_TOKEN, _TOKENS["video_token_id"]))
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


_OF_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION_MODELS["qwen3_vl_moe"] = (
    {**VISION_MODELS["qwen3_vl"][0], **_OF_EXPERTS},
    VISION_MODELS["qwen3_vl"][1],
)
# Of a size that the kernels of GPUs take: heads of 64, and towers' heads of 80 or 72, as the large models have, and
# features of a feed-forward that are no multiple of 8.
_WIDE_TEXT = {"hidden_size": 256, "head_dim": 64}
_WIDE_TOWERS = {
    "qwen2_vl": {"embed_dim": 160, "hidden_size": 256},
    "qwen2_5_vl": {"hidden_size": 160, "intermediate_size": 1020, "out_hidden_size": 256},
    "qwen3_vl": {"hidden_size": 144, "out_hidden_size": 256},
}


def vision_config(model_type: str, wide: bool = False) -> Any:
    """Transformers' config of a tiny model."""
    from transformers import AutoConfig

    text, tower = VISION_MODELS[model_type]
    if wide:
        rope = {**text["rope_parameters"], "mrope_section": [8, 12, 12]}
        text, tower = {**_WIDE_TEXT, "rope_parameters": rope}, {**tower, **_WIDE_TOWERS[model_type]}
    return AutoConfig.for_model(
        model_type, text_config={**_TEXT, **text}, vision_config={**_PATCHES, **tower}, **_TOKENS
    )


def save_vision_model(model_type: str, folder: Path, wide: bool = False) -> Any:
    """Writes a tiny model in float32, whose attention is far from uniform; returns it."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(vision_config(model_type, wide), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
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


def media_prompt(*parts: Sequence[int] | tuple[np.ndarray, Grid]) -> MediaPrompt:
    """A prompt of token ids and images, in order, as a processor makes it."""
    ids: list[int] = []
    items = []
    for part in parts:
        if not isinstance(part, tuple):
            ids += part
            continue
        pixels, grid = part
        count = len(pixels) // MERGE**2
        tensors = {"pixel_values": pixels, "image_grid_thw": np.array([grid])}
        items.append(MediaItem("image", len(ids), count, hashlib.sha256(pixels.tobytes()).digest(), tensors))
        ids += [IMAGE_TOKEN] * count
    return MediaPrompt(ids, tuple(items), np.array(ids) == IMAGE_TOKEN)


@torch.no_grad()
def transformers_logprobs(model: Any, prompt: MediaPrompt | list[int], answer: Sequence[int] = ()) -> torch.Tensor:
    """[n - 1] log-probability of each token of prompt and answer but the first, by Transformers' forward."""
    ids = list(prompt) if isinstance(prompt, list) else list(prompt.prompt_token_ids)
    tokens = torch.tensor([ids + list(answer)], device=model.device)
    said: dict[str, Any] = {}
    if isinstance(prompt, MediaPrompt):
        for name in ("pixel_values", "image_grid_thw"):
            array = np.concatenate([item.tensors[name] for item in prompt.items])
            said[name] = torch.from_numpy(array).to(model.device)
        said["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).long()
    logits = model(input_ids=tokens, use_cache=False, **said).logits[0]
    scores = torch.log_softmax(logits.double(), -1)[:-1]
    return scores.gather(1, tokens[0, 1:, None])[:, 0].cpu()


@torch.no_grad()
def transformers_greedy(model: Any, prompt: MediaPrompt | list[int], max_tokens: int) -> list[int]:
    """The tokens that Transformers' forward chooses, the whole text anew for each."""
    said: dict[str, Any] = {}
    ids = list(prompt) if isinstance(prompt, list) else list(prompt.prompt_token_ids)
    if isinstance(prompt, MediaPrompt):
        for name in ("pixel_values", "image_grid_thw"):
            said[name] = torch.from_numpy(np.concatenate([item.tensors[name] for item in prompt.items]))
    answer: list[int] = []
    for _ in range(max_tokens):
        tokens = torch.tensor([ids + answer])
        if said:
            said["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).long()
        answer.append(int(model(input_ids=tokens, use_cache=False, **said).logits[0, -1].argmax()))
    return answer
