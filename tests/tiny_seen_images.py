"""A tiny Mllama with random weights: its folder, prompts with images, and Transformers' answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mllm_compile.media.prompt import MediaItem, MediaPrompt

VOCAB = 259
IMAGE_TOKEN = VOCAB  # behind all that the head gives, as of the published models
TILES, SIDE, STATES = 4, 28, 5  # of an image; pixels of a tile's side; states of a tile
_RATIOS = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
_SPECIAL = ("<|end|>", "<|begin|>", "<|python_tag|>")
_TEMPLATE = (
    "<|begin|>{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}<|image|>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endfor %}:"
)
Prompt = MediaPrompt | list[int]


class Tiled(NamedTuple):
    """A random image that fills so many tiles; images of one seed are alike."""

    seed: int
    tiles: int


def mllama_config(**text: Any) -> Any:
    from transformers import MllamaConfig

    return MllamaConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "cross_attention_layers": [1, 3],
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 0,
            **text,
        },
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_global_layers": 2,
            "attention_heads": 2,
            "intermediate_size": 48,
            "image_size": SIDE,
            "patch_size": 14,
            "max_num_tiles": TILES,
            "vision_output_dim": 32 * 3,
            "intermediate_layers_indices": [0, 1],
            "supported_aspect_ratios": _RATIOS,
        },
        image_token_index=IMAGE_TOKEN,
    )


def save_mllama(folder: Path, **text: Any) -> Any:
    """Writes a tiny model in float32, whose gates are open; returns it."""
    from transformers import MllamaForConditionalGeneration

    torch.manual_seed(0)
    model: Any = MllamaForConditionalGeneration._from_config(mllama_config(**text), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
            elif "gate" in name:
                parameter.fill_(0.7)
    model.save_pretrained(folder)
    return model


def add_processor(folder: Path) -> None:
    """Writes a tokenizer and a processor of Mllama's kind beside the model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(_SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.add_special_tokens([AddedToken("<|image|>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _SPECIAL[0], "bos_token": _SPECIAL[1]}
    of_images = {
        "processor_class": "MllamaProcessor",
        "image_processor_type": "MllamaImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "max_image_tiles": TILES,
        **dict.fromkeys(("do_resize", "do_pad", "do_normalize", "do_rescale", "do_convert_rgb"), True),
    }
    texts = {"tokenizer_config.json": said | {"chat_template": _TEMPLATE}, "preprocessor_config.json": of_images}
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def prompt_of(*parts: Sequence[int] | Tiled) -> MediaPrompt:
    """A prompt of token ids and images, in order, as the processor makes it."""
    ids: list[int] = []
    items = []
    for part in parts:
        if not isinstance(part, Tiled):
            ids += part
            continue
        generator = torch.Generator().manual_seed(part.seed)
        pixels = torch.randn(1, 1, TILES, 3, SIDE, SIDE, generator=generator).numpy()
        pixels[:, :, part.tiles :] = 0
        mask = (np.arange(TILES) < part.tiles).astype(np.int64)[None, None]
        tensors = {"pixel_values": pixels, "aspect_ratio_ids": np.array([[part.tiles]]), "aspect_ratio_mask": mask}
        digest = hashlib.sha256(pixels.tobytes() + mask.tobytes()).digest()
        items.append(MediaItem("image", len(ids), 1, digest, tensors))
        ids.append(IMAGE_TOKEN)
    return MediaPrompt(ids, tuple(items), np.array(ids) == IMAGE_TOKEN)


def mask_of(token_ids: list[int], tiles: list[int]) -> np.ndarray:
    """[1, tokens, images, tiles]: which tiles each token sees, by Transformers' processor."""
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    ranges = [get_cross_attention_token_mask(token_ids, IMAGE_TOKEN)]
    return convert_sparse_cross_attention_mask_to_dense(ranges, [tiles], TILES, len(token_ids))


def _said(model: Any, prompt: Prompt, answer: Sequence[int]) -> dict[str, torch.Tensor]:
    """Arguments of Transformers' forward for a prompt and an answer, which sees what the prompt's last token does."""
    ids = prompt if isinstance(prompt, list) else prompt.prompt_token_ids
    said = {"input_ids": torch.tensor([[*ids, *answer]])}
    if not isinstance(prompt, list):
        for name in prompt.items[0].tensors:
            said[name] = torch.from_numpy(np.concatenate([one.tensors[name] for one in prompt.items], 1))
        mask = torch.from_numpy(mask_of(ids, [int(one.tensors["aspect_ratio_mask"].sum()) for one in prompt.items]))
        said["cross_attention_mask"] = torch.cat([mask, mask[:, -1:].expand(-1, len(answer), -1, -1)], 1)
    said = {name: value.to(model.device) for name, value in said.items()}
    return said | ({} if isinstance(prompt, list) else {"pixel_values": said["pixel_values"].to(model.dtype)})


@torch.no_grad()
def scores_of(model: Any, prompt: Prompt, count: int) -> tuple[list[int], list[float]]:
    """The tokens that Transformers' forward chooses, the whole text anew for each, and their log-probabilities."""
    answer: list[int] = []
    scores: list[float] = []
    for _ in range(count):
        logits = model(**_said(model, prompt, answer), use_cache=False).logits[0, -1]
        answer.append(int(logits.argmax()))
        scores.append(float(torch.log_softmax(logits.double(), -1)[answer[-1]]))
    return answer, scores


@torch.no_grad()
def scores_of_answer(model: Any, prompt: Prompt, ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [N] float32 of an answer `ids` [N], by Transformers' forward."""
    logits = model(**_said(model, prompt, ids[:-1]), use_cache=False).logits[0, -len(ids) :].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids, device=model.device)[:, None])[:, 0].cpu()
