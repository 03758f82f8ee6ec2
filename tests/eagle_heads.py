"""EAGLE-3 heads in Speculators' format, for tests: random ones, and a model with a head that is always right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional


def head_config(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """config.json of a head for a model of this config.json."""
    names = ("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads", "num_key_value_heads")
    layer = {name: model[name] for name in (*names, "head_dim", "intermediate_size", "rms_norm_eps")}
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},  # code of that library, which is not run
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "draft_vocab_size": model["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [0, 1, model["num_hidden_layers"]],
        "norm_before_residual": False,
        "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1, **layer},
    } | changes


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors that the format has for such a config."""
    layer, generator = config["transformer_layer_config"], torch.Generator().manual_seed(seed)
    size, ffn, vocab = layer["hidden_size"], layer["intermediate_size"], layer["vocab_size"]
    heads, kv_heads = (layer[name] * layer["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    num_read, drafted = len(config["eagle_aux_hidden_state_layer_ids"]), config["draft_vocab_size"]
    shapes = {
        "embed_tokens": (vocab, size),
        "fc": (size, num_read * size),
        "lm_head": (drafted, size),
        **{
            f"layers.0.self_attn.{name}_proj": (rows, 2 * size)
            for name, rows in {"q": heads, "k": kv_heads, "v": kv_heads}.items()
        },
        "layers.0.self_attn.o_proj": (size, heads),
        "layers.0.mlp.gate_proj": (ffn, size),
        "layers.0.mlp.up_proj": (ffn, size),
        "layers.0.mlp.down_proj": (size, ffn),
    }
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()
    }
    norms = [f"layers.0.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    tensors |= {f"{name}.weight": torch.ones(size) for name in ("norm", *norms)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.rand(num_read * size, generator=generator) + 0.5
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": torch.rand(size, generator=generator) + 0.5 for i in range(num_read)}
    if config["speculators_model_type"] == "peagle":
        tensors["mask_hidden"] = torch.randn(1, 1, num_read * size, generator=generator)
    if drafted != vocab:
        known = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        tensors["d2t"] = known - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, known, True)
    return tensors


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """[T, H, D] at positions 0 to T - 1."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = (torch.cat([of(angles)] * 2, -1)[:, None] for of in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def eagle_numbers(
    config: dict[str, Any], w: dict[str, torch.Tensor], ids: torch.Tensor, read: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(projected hidden states, logits in the model's vocabulary, own hidden states); `read` is [T, n * hidden]."""
    layer, num_read = config["transformer_layer_config"], len(config["eagle_aux_hidden_state_layer_ids"])
    size, head_dim = layer["hidden_size"], layer["head_dim"]
    if config.get("norm_before_fc"):
        read = _normed(read, w["input_norm.weight"])
    if config.get("fc_norm"):
        read = torch.cat([_normed(read[:, i * size :][:, :size], w[f"fc_norm.{i}.weight"]) for i in range(num_read)], 1)
    hidden = read @ w["fc.weight"].T
    of_hidden = _normed(hidden, w["layers.0.hidden_norm.weight"])
    both = torch.cat([_normed(w["embed_tokens.weight"][ids], w["layers.0.input_layernorm.weight"]), of_hidden], 1)
    q, k, v = ((both @ w[f"layers.0.self_attn.{name}_proj.weight"].T).unflatten(1, (-1, head_dim)) for name in "qkv")
    q, k, v = _rotated(q), _rotated(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    future = torch.full((len(ids),) * 2, -torch.inf).triu(1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5 + future
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    x = (of_hidden if config["norm_before_residual"] else hidden) + attended @ w["layers.0.self_attn.o_proj.weight"].T
    y = _normed(x, w["layers.0.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (functional.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T
    last = _normed(x, w["norm.weight"])
    logits = last @ w["lm_head.weight"].T
    if "d2t" in w:
        whole = torch.full((len(ids), layer["vocab_size"]), torch.finfo(torch.float32).min)
        for place, offset in enumerate(w["d2t"].tolist()):
            whole[:, place + offset] = logits[:, place]
        logits = whole
    return hidden, logits, last if config.get("norm_output") else x


def sizes_of(model: Path) -> dict[str, Any]:
    """The sizes of a head for the model of a folder, whatever its layers are."""
    found = json.loads((model / "config.json").read_text())
    text = found.get("text_config") or found
    sizes = {name: text[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers")}
    layer = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
    return sizes | layer | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6}


def random_head(folder: Path, model: Path) -> Path:
    """Saves a head of random weights for the model of a folder."""
    sizes = sizes_of(model)
    ids = sorted({0, 1, sizes["num_hidden_layers"]})
    return save_head(folder, head_config(sizes, eagle_aux_hidden_state_layer_ids=ids))


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def markov_model(folder: Path, vocab: int = 60, head_dim: int = 16) -> torch.Tensor:
    """Saves a Llama model whose next token follows from the last alone; returns the one behind each token.

    Its embeddings are unit vectors, its layers add nothing, and its logits are of a permutation of tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    behind = torch.randperm(vocab, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, 64))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[behind, torch.arange(vocab)] = 1.0
    model.save_pretrained(folder)
    return behind


def right_head(folder: Path, behind: torch.Tensor, draft_vocab_size: int = 60, head_dim: int = 16) -> Path:
    """A head that is always right about markov_model, of the tokens that its vocabulary has.

    It reads the embeddings, its MLP moves a token's unit vector to that of the one behind it, and its logits are the
    model's.
    """
    vocab, size = len(behind), 64
    model = {"hidden_size": size, "vocab_size": vocab, "max_position_embeddings": 256, "num_attention_heads": 4}
    model |= {"num_key_value_heads": 2, "head_dim": head_dim, "intermediate_size": 96, "rms_norm_eps": 1e-6}
    config = head_config(model | {"num_hidden_layers": 3}, draft_vocab_size=draft_vocab_size)
    tensors = random_tensors(config)
    moves = torch.zeros(size, size)
    moves[behind, torch.arange(vocab)] = 1.0
    normed = size**0.5  # the norm of a unit vector's one number
    gated = functional.silu(torch.tensor(normed)).item() * normed
    identity, wide = torch.eye(size), torch.zeros(96, size)
    wide[:size] = identity
    tensors["fc.weight"] = torch.cat([identity, torch.zeros(size, 2 * size)], 1)
    tensors["layers.0.self_attn.o_proj.weight"].zero_()
    tensors["layers.0.mlp.gate_proj.weight"] = wide
    tensors["layers.0.mlp.up_proj.weight"] = wide.clone()
    tensors["layers.0.mlp.down_proj.weight"] = torch.cat([(moves - identity) / gated, torch.zeros(size, 32)], 1)
    known = tensors["d2t"] + torch.arange(draft_vocab_size) if "d2t" in tensors else torch.arange(vocab)
    tensors["lm_head.weight"] = moves[known].contiguous()
    return save_head(folder, config, tensors)
