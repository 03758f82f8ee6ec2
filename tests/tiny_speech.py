"""A tiny Phi-4-multimodal with random weights: its folder, prompts with sounds, and Transformers' answers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mllm_compile.media.prompt import MediaItem, MediaPrompt
from tests.tiny_sounds import IMAGE_TOKEN, SOUND_TOKEN, Sound
from tests.tiny_vision import TEXT

BINS, FRAMES_OF_A_ROW = 16, 8
CONFIG: dict[str, Any] = {
    **{name: value for name, value in TEXT.items() if name != "head_dim"},
    "max_position_embeddings": 2048,
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "crop_size": 16,
        "image_token_id": IMAGE_TOKEN,
    },
    "audio_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_blocks": 2,
        "num_attention_heads": 2,
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "input_size": BINS,
        "nemo_conv_channels": 8,
        "bias_max_distance": 60,
        "audio_token_id": SOUND_TOKEN,
    },
}


def save_speech_model(folder: Path, sound_token: int = SOUND_TOKEN, bins: int = BINS, **text: Any) -> Any:
    """Writes the model in float32, whose attention is far from uniform; returns it."""
    from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM

    torch.manual_seed(0)
    sounds = {**CONFIG["audio_config"], "audio_token_id": sound_token, "input_size": bins}
    model = Phi4MultimodalForCausalLM(Phi4MultimodalConfig(**CONFIG | text | {"audio_config": sounds})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("global_mean", "global_invstd")):
                buffer.uniform_(0.5, 1.5)
        model.get_output_embeddings().weight[[sound_token, IMAGE_TOKEN]] = 0
    model.save_pretrained(folder)
    return model


def speech_prompt(*parts: Sequence[int] | Sound) -> MediaPrompt:
    """A prompt of token ids and sounds, in order, as a processor makes it."""
    ids: list[int] = []
    items = []
    for part in parts:
        if not isinstance(part, Sound):
            ids += part
            continue
        count = math.ceil(part.frames / FRAMES_OF_A_ROW)
        given = torch.randn(1, part.frames, BINS, generator=torch.Generator().manual_seed(part.seed)).numpy()
        digest = hashlib.sha256(given.tobytes()).digest()
        items.append(MediaItem("audio", len(ids), count, digest, {"input_features": given}))
        ids += [SOUND_TOKEN] * count
    return MediaPrompt(ids, tuple(items), np.isin(ids, (SOUND_TOKEN,)))


@torch.no_grad()
def _embeddings(model: Any, prompt: MediaPrompt | list[int], answer: Sequence[int]) -> torch.Tensor:
    """Each sound by itself: in a batch a shorter one would hear what fills it up."""
    items = () if isinstance(prompt, list) else prompt.items
    ids = [*(prompt if isinstance(prompt, list) else prompt.prompt_token_ids), *answer]
    found: torch.Tensor = model.get_input_embeddings()(torch.tensor([ids], device=model.device))
    for item in items:
        own = torch.tensor([ids[item.start : item.start + item.length]], device=model.device)
        given = torch.from_numpy(item.tensors["input_features"])
        said = {"audio_input_features": given, "audio_embed_sizes": torch.tensor([item.length])}
        embedded = model.model.embed_tokens_extend(own, model.get_input_embeddings()(own), **said)
        found[:, item.start : item.start + item.length] = embedded
    return found


@torch.no_grad()
def greedy(model: Any, prompt: MediaPrompt | list[int], max_tokens: int) -> list[int]:
    """The tokens that Transformers' forward chooses, the whole text anew for each."""
    answer: list[int] = []
    for _ in range(max_tokens):
        logits = model(inputs_embeds=_embeddings(model, prompt, answer), use_cache=False).logits[0, -1]
        answer.append(int(logits.argmax()))
    return answer


@torch.no_grad()
def logprobs(model: Any, prompt: MediaPrompt) -> torch.Tensor:
    """[n - 1] log-probability of each token of the prompt but the first, on the CPU."""
    logits = model(inputs_embeds=_embeddings(model, prompt, ()), use_cache=False).logits[0].cpu()
    tokens = torch.tensor(list(prompt.prompt_token_ids))
    return torch.log_softmax(logits.double(), -1)[:-1].gather(1, tokens[1:, None])[:, 0]
