"""Writes tiny models as GGUF files: names of the package gguf, and the changes that llama.cpp's converters make."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

from tests.model.tiny_configs import tiny_config

Kinds = Callable[[str], gguf.GGMLQuantizationType]
F32 = gguf.GGMLQuantizationType.F32
_PERMUTED = {"llama", "mixtral", "granite", "smollm3"}
_PLUS_ONE = {"gemma", "gemma2", "gemma3_text", "nemotron"}
_NONE = {"bos_token_id": None, "eos_token_id": None}
_FULL = {"layer_types": ["full_attention"] * 4}
# GGUF's name → Transformers', and changes to the tiny config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": False}),
    "llama with biases": ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": False, **_FULL, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"use_sliding_window": False, **_FULL}),
    "qwen2moe": ("qwen2_moe", {"use_sliding_window": False, **_FULL, "norm_topk_prob": False}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True, "sliding_window": None}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 4}),
    "phi3": ("phi3", {"sliding_window": None}),
    "granite": ("granite", {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "nemotron": ("nemotron", {}),
    "smollm3": (
        "smollm3",
        {"no_rope_layers": [1, 1, 1, 0], **_FULL, "use_sliding_window": False, "sliding_window": None},
    ),
    "command-r": ("cohere", {"logit_scale": 0.25}),
    "gpt2": ("gpt2", {"n_inner": 96}),
}
_NAMES = {"mixtral": "llama", "llama with biases": "llama"}


def tiny_model(name: str) -> Any:
    """The random model of MODELS' entry, in float32."""
    from transformers import AutoModelForCausalLM

    model_type, changes = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **_NONE, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_model(model: Any, name: str, path: Path, kinds: Kinds = lambda name: F32, **keys: Any) -> None:
    """Writes the model, and gives it the numbers that the file has: those of its blocks.

    Args:
        name: an entry of MODELS.
        kinds: the block type of a tensor, by GGUF's name.
        keys: further metadata, with `__` for a dot; numbers and texts.
    """
    architecture = _NAMES.get(name, name)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(model.config, architecture) | _dotted(keys)).items():
        add_value(writer, key, value)
    for gguf_name, parameter, change, back in _tensors(model, architecture):
        data = change(parameter.detach().numpy())
        kind = kinds(gguf_name) if data.ndim > 1 and not gguf_name.startswith("position") else F32
        stored = np.ascontiguousarray(quantize(np.ascontiguousarray(data, np.float32), kind))
        writer.add_tensor(gguf_name, stored, raw_dtype=kind)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(back(dequantize(stored, kind)))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a value under the type that converters give it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _dotted(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in keys.items()}


def _metadata(config: Any, name: str) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.n_inner if name == "gpt2" else config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "vocab_size": config.vocab_size,
    }
    if name != "gpt2":
        turning = int(head_dim * (rope.get("partial_rotary_factor") or 1))
        found |= {"attention.head_count_kv": config.num_key_value_heads, "rope.dimension_count": turning}
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        found |= {"rope.freq_base": float(rope["rope_theta"])}
    eps = {"rms_norm_eps": "rms_", "norm_epsilon": "", "layer_norm_eps": "", "norm_eps": "", "layer_norm_epsilon": ""}
    for key, kind in eps.items():
        if hasattr(config, key):
            found[f"attention.layer_norm_{kind}epsilon"] = float(getattr(config, key))
    others = {
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling" if name == "granite" else "logit_scale",
        "use_parallel_residual": "use_parallel_residual",
    }
    given = {key: getattr(config, theirs, None) for key, theirs in others.items()}
    found |= {key: value for key, value in given.items() if value or value is False}
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    found |= {"expert_count": experts} if experts else {}
    return {f"{name}.{key}": value for key, value in found.items()}


def _tensors(model: Any, name: str) -> list[tuple[str, torch.Tensor, Any, Any]]:
    """GGUF's name, the parameter or a part of it, the converter's change, and the way back."""
    architectures = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[name], model.config.num_hidden_layers)
    kind, found = model.config.model_type, []
    seen: set[int] = set()
    for key, parameter in model.named_parameters():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if (layer := re.search(r"layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)", key)) is not None:
            prefix, same = f"blk.{layer[1]}.ffn_", lambda one: one
            if layer[2] == "down_proj":
                found.append((f"{prefix}down_exps.weight", parameter, same, same))
            else:
                gate, up = parameter.chunk(2, 1)
                found += [(f"{prefix}gate_exps.weight", gate, same, same), (f"{prefix}up_exps.weight", up, same, same)]
            continue
        base, dot, suffix = key.rpartition(".")
        found.append((names.get_name(base) + dot + suffix, parameter, *_changes(kind, key, model.config)))
    return found


def _changes(kind: str, key: str, config: Any) -> tuple[Any, Any]:
    if kind in _PERMUTED and ("q_proj" in key or "k_proj" in key):
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        return (lambda one: _swapped(one, heads, 2, -1)), (lambda one: _swapped(one, heads, -1, 2))
    if kind in _PLUS_ONE and key.endswith(("norm.weight", "layernorm.weight")):
        return (lambda one: one + np.float32(1)), (lambda one: one - np.float32(1))
    if kind == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", key):
        return (lambda one: one.T), (lambda one: one.T)
    if key.endswith("shared_expert_gate.weight"):
        return (lambda one: one[0]), (lambda one: one[None])
    return (lambda one: one), (lambda one: one)


def _swapped(one: np.ndarray, heads: int, first: int, second: int) -> np.ndarray:
    """Rows of each head, [first, second], the other way round."""
    return (
        one.reshape(heads, *((first, second) if first > 0 else (one.shape[0] // heads // 2, 2)), *one.shape[1:])
        .swapaxes(1, 2)
        .reshape(one.shape)
    )
