"""DFlash heads in Speculators' format, for tests: random ones, and their numbers by plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.eagle_heads import markov_model, save_head, sizes_of

EPS, THETA = 1e-6, 10000.0


def dflash_config(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """config.json of a head of two layers for a model of this config.json."""
    names = ("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads", "num_key_value_heads")
    layer = {name: model[name] for name in (*names, "head_dim", "intermediate_size")}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash"},
        "draft_vocab_size": model["vocab_size"],
        "block_size": 8,
        "aux_hidden_state_layer_ids": [1, model["num_hidden_layers"] - 1],
        "mask_token_id": 7,
        "sample_from_anchor": False,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            **layer,
        },
    } | changes


def dflash_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors that the format has for such a config; published heads leave some to the model."""
    layer, generator = config["transformer_layer_config"], torch.Generator().manual_seed(seed)
    size, ffn, vocab, head = (layer[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    heads, kv_heads = (layer[name] * head for name in ("num_attention_heads", "num_key_value_heads"))
    num_read, drafted = len(config["aux_hidden_state_layer_ids"]), config["draft_vocab_size"]
    shapes = {"embed_tokens": (vocab, size), "fc": (size, num_read * size), "lm_head": (drafted, size)}
    norms = {"hidden_norm": size, "norm": size}
    for place in range(layer["num_hidden_layers"]):
        attention, mlp = f"layers.{place}.self_attn", f"layers.{place}.mlp"
        shapes |= {
            f"{attention}.{one}_proj": (rows, size)
            for one, rows in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
        }
        shapes |= {f"{attention}.o_proj": (size, heads), f"{mlp}.down_proj": (size, ffn)}
        shapes |= {f"{mlp}.gate_proj": (ffn, size), f"{mlp}.up_proj": (ffn, size)}
        norms |= {f"{attention}.{one}_norm": head for one in "qk"}
        norms |= {f"layers.{place}.{one}_layernorm": size for one in ("input", "post_attention")}
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": torch.rand(count, generator=generator) + 0.5 for name, count in norms.items()}
    if drafted != vocab:
        known = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        tensors["d2t"] = known - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, known, True)
    return tensors


def random_dflash_head(folder: Path, model: Path) -> Path:
    """Saves a head of random weights for the model of a folder, which lends it its embeddings."""
    sizes = sizes_of(model)
    config = dflash_config(sizes, aux_hidden_state_layer_ids=sorted({0, sizes["num_hidden_layers"]}))
    tensors = dflash_tensors(config)
    del tensors["embed_tokens.weight"]
    return save_head(folder, config, tensors)


def echo(folder: Path, head_dim: int) -> tuple[Path, Path]:
    """(a model that says its last token for ever, a head that drafts the newest token)."""
    markov_model(folder / "model", head_dim=head_dim)
    path, (vocab, size) = folder / "model" / "model.safetensors", (60, 64)
    save_file(load_file(path) | {"lm_head.weight": torch.eye(vocab, size)}, path, {"format": "pt"})
    sizes = sizes_of(folder / "model") | {"head_dim": head_dim, "num_key_value_heads": 2}
    config = dflash_config(sizes, mask_token_id=vocab - 1)
    tensors = {name: torch.zeros_like(one) for name, one in dflash_tensors(config).items()}
    tensors |= {name: torch.ones_like(one) for name, one in tensors.items() if "norm" in name}
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"] = torch.eye(vocab, size)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    tensors["lm_head.weight"][vocab - 1] = 0.0  # masks say nothing of themselves
    # Queries of zeros see all alike, and of all the newest token alone has a value that is not its mask's.
    values = torch.eye(size).repeat(-(-2 * head_dim // size), 1)[: 2 * head_dim]
    tensors["layers.0.self_attn.v_proj.weight"] = values.index_fill(1, torch.tensor([vocab - 1]), 0.0).contiguous()
    back = torch.eye(head_dim)[:size] if head_dim >= size else torch.zeros(size, head_dim)
    tensors["layers.0.self_attn.o_proj.weight"][:, :head_dim] = 64.0 * back
    return folder / "model", save_head(folder / "head", config, tensors)


def dflash_draft(
    config: dict[str, Any], w: dict[str, torch.Tensor], read: torch.Tensor, newest: int, count: int
) -> torch.Tensor:
    """[count] int64: the draft behind token `newest`, by the published maths.

    Args:
        read: [L, n * hidden], the model's hidden states of the tokens before it.
    """
    block = torch.tensor([newest, *[config["mask_token_id"]] * (count - config["sample_from_anchor"])])
    layer = config["transformer_layer_config"]
    heads, kv_heads, head_dim = (layer[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    context = _normed(read @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = w["embed_tokens.weight"][block]
    for place in range(layer["num_hidden_layers"]):
        of = {name.removeprefix(f"layers.{place}."): one for name, one in w.items() if f"layers.{place}." in name}
        y = _normed(x, of["input_layernorm.weight"])
        seen = torch.cat([context, y])
        q = (y @ of["self_attn.q_proj.weight"].T).unflatten(1, (heads, head_dim))
        k, v = ((seen @ of[f"self_attn.{one}_proj.weight"].T).unflatten(1, (kv_heads, head_dim)) for one in "kv")
        q, k = (_normed(one, of[f"self_attn.{name}_norm.weight"]) for name, one in (("q", q), ("k", k)))
        q, k = _rotated(q, len(read)), _rotated(k, 0)
        k, v = (one.repeat_interleave(heads // kv_heads, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5  # no mask: all see all
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + attended @ of["self_attn.o_proj.weight"].T
        y = _normed(x, of["post_attention_layernorm.weight"])
        gate, up = (y @ of[f"mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        x = x + (functional.silu(gate) * up) @ of["mlp.down_proj.weight"].T
    chosen = (_normed(x, w["norm.weight"]) @ w["lm_head.weight"].T).argmax(-1)[-count:]
    return chosen + w["d2t"][chosen] if "d2t" in w else chosen


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _rotated(x: torch.Tensor, start: int) -> torch.Tensor:
    """[T, H, D] at positions from `start` on."""
    half = x.shape[-1] // 2
    angles = torch.arange(start, start + len(x))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = (torch.cat([of(angles)] * 2, -1)[:, None] for of in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
