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
_FLOATS = re.compile(r"position_embd|ssm_conv1d|shortconv\.conv|ssm_a$|gate_inp\.|_exps\.bias")  # never in blocks
_PERMUTED = {"llama", "mixtral", "granite", "smollm3"}
_PLUS_ONE = {"gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_5_text", "qwen3_5_moe_text"}
_YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"truncate": False, "original_max_position_embeddings": 8}
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
    "qwen35": ("qwen3_5_text", {}),
    "qwen35moe": ("qwen3_5_moe_text", {}),
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
    "gpt-oss": ("gpt_oss", {"rope_parameters": _YARN}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "falcon": ("falcon", {"num_ln_in_parallel_attn": 2}),
    "falcon with one norm": ("falcon", {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
    "falcon with one key": ("falcon", {"new_decoder_architecture": False, "num_kv_heads": 1}),
    "bloom": ("bloom", {}),
    "mamba": ("mamba", {"intermediate_size": 128}),
    "mamba of falcon": ("falcon_mamba", {"intermediate_size": 128}),
    "minimax-m2": ("minimax_m2", {"rotary_dim": 8}),
    "gemma4": (
        "gemma4_text",
        {"global_head_dim": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 5.0},
    ),
    "gemma4 with experts": (
        "gemma4_text",
        {
            "global_head_dim": 32,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
        },
    ),
}


def tiny_model(name: str, **sizes: Any) -> Any:
    """The random model of MODELS' entry, in float32; `sizes` change its config."""
    from transformers import AutoModelForCausalLM

    model_type, changes = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(model_type, **_NONE, **changes, **sizes), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_model(model: Any, name: str, path: Path, kinds: Kinds = lambda name: F32, **keys: Any) -> None:
    """Writes the model, and gives it the file's numbers, from its blocks.

    Args:
        name: an entry of MODELS.
        kinds: the block type of a tensor, by GGUF's name.
        keys: further metadata, with `__` for a dot; numbers and texts.
    """
    architecture = "llama" if name == "mixtral" else name.partition(" ")[0]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(model.config, architecture) | _dotted(keys)).items():
        add_value(writer, key, value)
    for gguf_name, values in _extra_tensors(model.config, architecture).items():
        writer.add_tensor(gguf_name, np.array(values, np.float32))
    for gguf_name, parameter, change, back in _tensors(model, architecture):
        data = change(parameter.detach().numpy())
        kind = kinds(gguf_name) if data.ndim > 1 and not _FLOATS.search(gguf_name) else F32
        kind = F32 if data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind
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
    config.allow_global_per_layer_attribute_access = True
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // (heads or 1)
    found = {
        "context_length": getattr(config, "max_position_embeddings", 2**20),
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.n_inner if name == "gpt2" else getattr(config, "intermediate_size", 0),
        "attention.head_count": heads,
        "vocab_size": config.vocab_size,
    }
    if name not in ("gpt2", "bloom", "falcon", "mamba"):
        turning = int(head_dim * (rope.get("partial_rotary_factor") or 1))
        found |= {"attention.head_count_kv": config.num_key_value_heads, "rope.dimension_count": turning}
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        found |= {"rope.freq_base": float(rope["rope_theta"])}
    rms = "rms_" if name in ("lfm2", "mamba") else ""
    eps = {"rms_norm_eps": "rms_", "norm_epsilon": "", "layer_norm_eps": "", "norm_eps": rms, "layer_norm_epsilon": rms}
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
    found |= _own_metadata(config, name)
    return {f"{name}.{key}": value for key, value in found.items()}


def _own_metadata(config: Any, name: str) -> dict[str, Any]:
    """Tensors that llama.cpp's converter of the architecture adds or changes."""
    wide = 4 * config.hidden_size
    match name:
        case "qwen35" | "qwen35moe":
            heads = config.linear_num_value_heads
            return {
                "block_count": config.num_hidden_layers + 1,
                "nextn_predict_layers": 1,
                "full_attention_interval": 2,
                "rope.dimension_sections": [11, 11, 10, 0],
                "ssm.conv_kernel": config.linear_conv_kernel_dim,
                "ssm.state_size": config.linear_key_head_dim,
                "ssm.group_count": config.linear_num_key_heads,
                "ssm.time_step_rank": heads,
                "ssm.inner_size": heads * config.linear_value_head_dim,
            }
        case "gpt-oss":
            scaling = {"type": "yarn", "factor": 32.0, "original_context_length": 8}
            scaling |= {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}
            found = {f"rope.scaling.{key}": value for key, value in scaling.items()}
            return found | {"expert_feed_forward_length": config.intermediate_size}
        case "minimax-m2":
            return {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2}
        case "lfm2":
            heads = [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types]
            return {"attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache}
        case "falcon":
            return {
                "attention.head_count_kv": config.num_kv_heads,
                "feed_forward_length": wide,
                "tensor_data_layout": "jploski",
            }
        case "bloom":
            return {"attention.head_count_kv": config.n_head, "feed_forward_length": wide}
        case "mamba":
            return {
                "feed_forward_length": 0,
                "ssm.conv_kernel": config.conv_kernel,
                "ssm.inner_size": config.intermediate_size,
                "ssm.state_size": config.state_size,
                "ssm.time_step_rank": config.time_step_rank,
                "ssm.dt_b_c_rms": config.model_type == "falcon_mamba",
            }
        case "gemma4":
            return _gemma4_metadata(config)
    return {}


def _gemma4_metadata(config: Any) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    wide = config.num_hidden_layers - config.num_kv_shared_layers
    full = config.per_layer_config[1]
    rope = config.rope_parameters
    found = {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }
    if config.use_double_wide_mlp:
        found["feed_forward_length"] = [config.intermediate_size * (1 + (layer >= wide)) for layer in layers]
    if config.attention_k_eq_v:
        found["attention.head_count_kv"] = [config.per_layer_config[layer].num_key_value_heads for layer in layers]
    if config.enable_moe_block:
        found |= {"expert_used_count": config.top_k_experts, "expert_feed_forward_length": config.moe_intermediate_size}
    return found


def _extra_tensors(config: Any, name: str) -> dict[str, list[float]]:
    if name.startswith("qwen35"):  # a layer that predicts further tokens
        layer = f"blk.{config.num_hidden_layers}"
        return {f"{layer}.{one}.weight": [1.0] * 32 for one in ("attn_norm", "ffn_gate_exps", "nextn.enorm")}
    if name != "gemma4":
        return {}
    half = config.per_layer_config[1].head_dim // 2
    turning = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return {"rope_freqs.weight": [1.0] * turning + [1e30] * (half - turning)}


def _tensors(model: Any, name: str) -> list[tuple[str, torch.Tensor, Any, Any]]:
    """GGUF's name, the parameter or a part of it, the converter's change, and the way back."""
    architectures = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[name], model.config.num_hidden_layers)
    kind, found = model.config.model_type, []
    seen: set[int] = set()
    for key, parameter in model.state_dict(keep_vars=True).items():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if (layer := re.search(r"layers\.(\d+)\.(mlp\.)?experts\.(\w+)", key)) is not None:
            found += _experts(f"blk.{layer[1]}.ffn_", layer[3], parameter, name)
            continue
        found.append((_gguf_name(names, key, name), parameter, *_changes(kind, key, model.config)))
    return found


def _gguf_name(names: Any, key: str, name: str) -> str:
    """The tensor's name; what llama.cpp's converters rename before they look it up is renamed."""
    if (router := re.fullmatch(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)", key)) is not None:
        return f"blk.{router[1]}.{'ffn_gate_inp' if router[2] == 'scale' else 'ffn_down_exps'}.scale"
    if key.endswith(("sinks", "layer_scalar")):
        key += ".weight"
    key = key.replace("dt_bias", "dt_proj.bias")
    key = key.replace("mlp.e_score_correction_bias", "block_sparse_moe.e_score_correction.bias")
    if name == "bloom":
        key = key.removeprefix("transformer.")
    base, dot, suffix = key.rpartition(".")
    return names.get_name(base) + dot + suffix if suffix in ("weight", "bias") else names.get_name(key)


def _experts(prefix: str, part: str, parameter: torch.Tensor, name: str) -> list[tuple[str, torch.Tensor, Any, Any]]:
    def same(one: np.ndarray) -> np.ndarray:
        return one

    def turned(one: np.ndarray) -> np.ndarray:
        return one.swapaxes(-1, -2)

    if name == "gemma4":
        return [(f"{prefix}{part.removesuffix('_proj')}_exps.weight", parameter, same, same)]
    suffix = "bias" if part.endswith("_bias") else "weight"
    turn = turned if name == "gpt-oss" and suffix == "weight" else same
    if part.startswith("down"):
        return [(f"{prefix}down_exps.{suffix}", parameter, turn, turn)]
    halves = (parameter[..., ::2], parameter[..., 1::2]) if name == "gpt-oss" else parameter.chunk(2, 1)
    return [
        (f"{prefix}{one}_exps.{suffix}", half, turn, turn) for one, half in zip(("gate", "up"), halves, strict=True)
    ]


def _changes(kind: str, key: str, config: Any) -> tuple[Any, Any]:
    if kind in _PERMUTED and ("q_proj" in key or "k_proj" in key):
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        return (lambda one: _swapped(one, heads, 2, -1)), (lambda one: _swapped(one, heads, -1, 2))
    if "linear_attn" in key and not key.endswith("norm.weight"):
        return _tiled(config, key)
    if kind in _PLUS_ONE and key.endswith("norm.weight") and "linear_attn" not in key:
        return (lambda one: one + np.float32(1)), (lambda one: one - np.float32(1))
    if kind == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", key):
        return (lambda one: one.T), (lambda one: one.T)
    if "query_key_value" in key:
        return _apart(config, kind)
    if key.endswith("A_log"):
        return (lambda one: -np.exp(one)), (lambda one: torch.from_numpy(-one).log().numpy())
    if key.endswith(("conv1d.weight", "conv.conv.weight")):
        return (lambda one: one.squeeze(1)), (lambda one: one[:, None])
    if key.endswith("shared_expert_gate.weight"):
        return (lambda one: one[0]), (lambda one: one[None])
    return (lambda one: one), (lambda one: one)


def _tiled(config: Any, key: str) -> tuple[Any, Any]:
    """Value heads of all key heads by turns, and the changes of exponentials and convolutions; and back."""
    groups, values = config.linear_num_key_heads, config.linear_num_value_heads
    skipped = 2 * groups * config.linear_key_head_dim if "qkv" in key or "conv1d" in key else 0

    def turned(one: np.ndarray, first: int, second: int) -> np.ndarray:
        if "out_proj" in key:
            one = one.T
        rest = one[skipped:]
        heads = rest.reshape(first, second, -1, *rest.shape[1:]).swapaxes(0, 1).reshape(rest.shape)
        whole = np.concatenate([one[:skipped], heads])
        return whole.T if "out_proj" in key else whole

    def changed(one: np.ndarray) -> np.ndarray:
        one = -np.exp(one) if key.endswith("A_log") else one
        return turned(one.squeeze(1) if "conv1d" in key else one, groups, values // groups)

    def back(one: np.ndarray) -> np.ndarray:
        one = turned(one, values // groups, groups)
        one = torch.from_numpy(-one).log().numpy() if key.endswith("A_log") else one
        return one[:, None] if "conv1d" in key else one

    return changed, back


def _apart(config: Any, kind: str) -> tuple[Any, Any]:
    """Queries of all groups, then keys, then values; and back."""
    groups = config.num_kv_heads if kind == "falcon" else config.n_head
    queries = config.num_attention_heads // groups

    def apart(one: np.ndarray) -> np.ndarray:
        by_group = one.reshape(groups, queries + 2, -1, *one.shape[1:])
        parts = (by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:])
        return np.concatenate([part.reshape(-1, *one.shape[1:]) for part in parts])

    def together(one: np.ndarray) -> np.ndarray:
        width = one.shape[0] // groups // (queries + 2)
        cuts = [groups * queries * width, groups * (queries + 1) * width]
        parts = [part.reshape(groups, -1, width, *one.shape[1:]) for part in np.split(one, cuts)]
        return np.concatenate(parts, 1).reshape(one.shape)

    return apart, together


def _swapped(one: np.ndarray, heads: int, first: int, second: int) -> np.ndarray:
    """Rows of each head, [first, second], the other way round."""
    return (
        one.reshape(heads, *((first, second) if first > 0 else (one.shape[0] // heads // 2, 2)), *one.shape[1:])
        .swapaxes(1, 2)
        .reshape(one.shape)
    )
