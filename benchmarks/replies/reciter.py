"""Weights of Qwen3's form with which a model recites the end of its prompt, with the time of any weights.

The *script*, the last tokens of a prompt, says what the reply is: each of its ids is a reply's with half of the
vocabulary added. So no draft by text finds the reply in it. A head of the first layer attends `distance` tokens back,
by position alone, and the output embedding gives the token that the script there stands for. All else that a layer
writes is too small to matter, though it multiplies as many random weights. Greedy steps of every kind, with their keys
and their drafts, are the engine's own.

Shape legend: H hidden size, D head size, C = KV heads x D, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mllm_compile.errors import ConfigError

_CONSTANT = 32.0  # the hidden state's first value, of every token
_MARGIN = 25.0  # of the attention's logit of the right position over every other one
_SMALL = 1e-6  # standard deviation of weights that are to change nothing
_MOST_TOKENS = 1 << 13


def script_of(reply: Sequence[int], length: int, vocab_size: int) -> list[int]:
    """The script [length] of a reply: the end of its prompt.

    Raises:
        ConfigError: the reply has ids that are a script's.
    """
    half = vocab_size // 2
    if max(reply) >= half:
        raise ConfigError(
            f"a reply's ids are below {half}, half of the vocabulary, got {max(reply)}; take a larger model"
        )
    return [token + half for token in reply] + [half] * (length - len(reply))


def reciting_weights(
    config: dict[str, Any], length: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that differ from random ones, by Transformers' names.

    Args:
        config: config.json of a model of type qwen3 with an output embedding of its own.
        length: tokens of a script.

    Raises:
        ConfigError: the model has another form, or too few channels.
    """
    size, vocab_size, head_dim = config["hidden_size"], config["vocab_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = kv_heads * head_dim
    if config["model_type"] != "qwen3" or config["tie_word_embeddings"] or size <= 2 * width:
        raise ConfigError(
            f"a reciting model is of type qwen3, with embeddings that are not tied and more than {2 * width} channels, "
            f"got {config['model_type']} with {size}; take configs/qwen-8b-shape.yaml"
        )
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.zeros(rows, columns, device=device, dtype=dtype)

    def small(rows: int, columns: int) -> torch.Tensor:
        return matrix(rows, columns).normal_(0.0, _SMALL, generator=generator)

    half, said, heard = vocab_size // 2, slice(1, 1 + width), slice(1 + width, 1 + 2 * width)
    codes = matrix(half, width).uniform_(-1.0, 1.0, generator=generator).sign_()
    embedding, head = small(vocab_size, size), small(vocab_size, size)
    embedding[:, 0] = _CONSTANT
    embedding[half : 2 * half, said] = codes
    head[:half, heard] = 0.01 * codes
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", head
    yield "model.norm.weight", torch.ones(size, device=device, dtype=dtype)

    query, key, scale = _directions(head_dim, config["rope_parameters"]["rope_theta"], length - 1)
    place = "model.layers.0."
    attention = place + "self_attn."
    yield place + "input_layernorm.weight", torch.ones(size, device=device, dtype=dtype)
    for name, direction, count in (("q", query, heads), ("k", key, kv_heads)):
        weight = matrix(count * head_dim, size)
        weight[:, 0] = direction.repeat(count).to(weight)
        yield f"{attention}{name}_proj.weight", weight
        yield f"{attention}{name}_norm.weight", torch.full((head_dim,), scale**0.5, device=device, dtype=dtype)
    value, out = matrix(width, size), small(size, heads * head_dim)
    value[:, said] = torch.eye(width, device=device, dtype=dtype)
    of_heads = out.view(size, kv_heads, heads // kv_heads, head_dim)
    of_heads[heard, :, 0] = 3 * torch.eye(width, device=device, dtype=dtype).view(width, kv_heads, head_dim)
    yield attention + "v_proj.weight", value
    yield attention + "o_proj.weight", out
    for layer in range(config["num_hidden_layers"]):
        if layer:
            yield f"model.layers.{layer}.self_attn.o_proj.weight", small(size, heads * head_dim)
        yield f"model.layers.{layer}.mlp.down_proj.weight", small(size, config["intermediate_size"])


def _directions(head_dim: int, base: float, distance: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A query and a key [D] whose product, rotated by RoPE, is largest so many tokens apart; and its factor."""
    speeds = base ** -(torch.arange(head_dim // 2, dtype=torch.float64) / (head_dim // 2))
    speeds = speeds[speeds > 1e-3]  # slower ones tell no two positions apart
    others = torch.arange(1, _MOST_TOKENS, dtype=torch.float64)
    apart = (1 - (others[:, None] * speeds).cos()).sum(1).min().item()
    scale = _MARGIN * len(speeds) / (math.sqrt(head_dim) * apart)
    query, key = torch.zeros(2, 2, head_dim // 2)
    key[0, : len(speeds)] = 1.0
    query[0, : len(speeds)] = (distance * speeds).cos()
    query[1, : len(speeds)] = -(distance * speeds).sin()
    return query.flatten(), key.flatten(), scale
