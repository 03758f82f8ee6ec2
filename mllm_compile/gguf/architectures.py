"""The architectures of GGUF files that are read: the content of config.json, and the changes that converters make.

Facts: constants.py of the package gguf, and llama.cpp's converters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from types import MappingProxyType
from typing import Any

from mllm_compile.gguf import own_values as own
from mllm_compile.gguf import tensor_names as names
from mllm_compile.gguf.facts import ModelFacts

# Keys behind `ARCHITECTURE.`, and their names in config.json.
_DEPTH = {"block_count": "num_hidden_layers", "embedding_length": "hidden_size"}
_QUERIES = _DEPTH | {"context_length": "max_position_embeddings", "attention.head_count": "num_attention_heads"}
_WIDTH = {"feed_forward_length": "intermediate_size"}
_SIZES = _QUERIES | _WIDTH | {"attention.head_count_kv": "num_key_value_heads"}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_BASE = _SIZES | _RMS
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_EXPERTS = _EXPERTS | {"expert_count": "num_local_experts"}
_MOE = _EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"}
_FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_SOFTCAPS = _FINAL_CAP | {"attn_logit_softcapping": "attn_logit_softcapping"}
_NO_CAPS = tuple(_SOFTCAPS)
_NO_WINDOW = ("sliding_window",)
_WINDOW = {"attention.sliding_window": "sliding_window"}
_LAYER_NORM = "attention.layer_norm_epsilon"


class Change(Enum):
    """A converter's change of a tensor."""

    PAIRS_OF_QUERIES = auto()  # rows that turn together are side by side, not in two halves of a head
    PAIRS_OF_KEYS = auto()
    PLUS_ONE = auto()
    TRANSPOSED = auto()  # the last two dimensions
    NO_ROWS = auto()  # dimension 0, of size 1, is left out
    NO_CHANNELS = auto()  # dimension 1, of size 1, is left out
    NEGATED_EXPONENTIALS = auto()
    VALUE_HEADS = auto()  # rows of the value heads of all key heads take turns: the first of each, the second of each
    VALUE_HEADS_BEHIND_KEYS = auto()  # behind queries and keys, as they are
    VALUE_CHANNELS = auto()  # the same of a convolution, without dimension 1
    VALUE_INPUTS = auto()  # columns
    VALUE_EXPONENTIALS = auto()  # and negated exponentials
    APART = auto()  # queries of all groups are followed by their keys and values


def _plus_one(tensors: Mapping[str, str]) -> dict[str, Change]:
    norms = (name for name in tensors if name.endswith("norm") and not name.endswith("ssm_norm"))
    return {f"{name}.weight": Change.PLUS_ONE for name in norms}


_PAIRS = {"blk.{}.attn_q": Change.PAIRS_OF_QUERIES, "blk.{}.attn_k": Change.PAIRS_OF_KEYS}
_GROUPS = {"blk.{}.attn_qkv": Change.APART}
_SSM = {"blk.{}.ssm_conv1d.weight": Change.NO_CHANNELS, "blk.{}.ssm_a": Change.NEGATED_EXPONENTIALS}


@dataclass(frozen=True)
class Architecture:
    """
    Attributes:
        model_type: Transformers' name.
        keys: metadata's keys without the architecture → keys of config.json.
        names: tensors without their suffix, or with it → the model's.
        changes: by the same names: what is to be changed back.
        values: what config.json says beside that.
        own: adds what the architecture alone says.
        has_heads: it attends.
        has_head_dim: config.json names the size of a head.
        has_rope: positions turn the queries and keys, as keys of all architectures say.
        attention_biases: the key of config.json that says if q, k and v have biases, or None.
        mlp_biases: config.json says if the MLP has biases.
        nulls: keys of config.json that are null where the file does not say them, as the class has another default.
        local_theta: the rotary base of layers with a window; None: all layers have one base.
        gate_up: the model's tensor that the experts' gate and up make.
        gates_by_turns: rows of gate and up take turns in it, and matrices are the other way round.
        variant: a key that says a number, or a tensor, and what a file with it is.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _BASE)
    names: Mapping[str, str] = field(default_factory=lambda: names.LLAMA)
    changes: Mapping[str, Change] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    own: Callable[[ModelFacts, dict[str, Any]], None] | None = None
    has_heads: bool = True
    has_head_dim: bool = True
    has_rope: bool = True
    attention_biases: str | None = None
    mlp_biases: bool = False
    nulls: tuple[str, ...] = ()
    local_theta: float | None = None
    gate_up: str = "model.layers.{}.mlp.experts.gate_up_proj"
    gates_by_turns: bool = False
    variant: tuple[str, Architecture] | None = None


_MIXTRAL = Architecture("mixtral", _BASE | _LOCAL_EXPERTS, names.LLAMA | names.EXPERTS, _PAIRS)
_FALCON_KEYS = _QUERIES | {
    "feed_forward_length": "ffn_hidden_size",
    "attention.head_count_kv": "num_kv_heads",
    _LAYER_NORM: "layer_norm_epsilon",
}
_FALCON = Architecture("falcon", _FALCON_KEYS, names.FALCON, _GROUPS, own=own.falcon, has_head_dim=False)
_MAMBA = Architecture(
    "mamba",
    _DEPTH
    | {
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.inner_size": "intermediate_size",
        "ssm.state_size": "state_size",
        "ssm.time_step_rank": "time_step_rank",
    },
    names.MAMBA,
    _SSM,
    own=own.mamba,
    has_heads=False,
    has_rope=False,
)

_QWEN35_KEYS = _BASE | {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_QWEN35_CHANGES = {
    "blk.{}.attn_qkv": Change.VALUE_HEADS_BEHIND_KEYS,
    "blk.{}.attn_gate": Change.VALUE_HEADS,
    "blk.{}.ssm_alpha": Change.VALUE_HEADS,
    "blk.{}.ssm_beta": Change.VALUE_HEADS,
    "blk.{}.ssm_dt.bias": Change.VALUE_HEADS,
    "blk.{}.ssm_a": Change.VALUE_EXPONENTIALS,
    "blk.{}.ssm_conv1d.weight": Change.VALUE_CHANNELS,
    "blk.{}.ssm_out": Change.VALUE_INPUTS,
}
_SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_SHARED_GATE = {"blk.{}.ffn_gate_inp_shexp": Change.NO_ROWS}

# By `general.architecture`.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            "llama",
            changes=_PAIRS,
            attention_biases="attention_bias",
            mlp_biases=True,
            variant=("expert_count", _MIXTRAL),
        ),
        "qwen2": Architecture("qwen2", has_head_dim=False, nulls=_NO_WINDOW),
        "qwen3": Architecture("qwen3", names=names.LLAMA | names.HEAD_NORMS, attention_biases="attention_bias"),
        "qwen2moe": Architecture(
            "qwen2_moe",
            _BASE | _MOE | _SHARED_EXPERT,
            names.LLAMA | names.EXPERTS | names.SHARED_EXPERT,
            _SHARED_GATE,
            {"norm_topk_prob": False},
            has_head_dim=False,
        ),
        "qwen3moe": Architecture(
            "qwen3_moe",
            _BASE | _MOE,
            names.LLAMA | names.HEAD_NORMS | names.EXPERTS,
            values={"norm_topk_prob": True},
        ),
        "qwen35": Architecture(
            "qwen3_5_text",
            _QWEN35_KEYS,
            names.QWEN35,
            _plus_one(names.QWEN35) | _QWEN35_CHANGES,
            own=own.qwen35,
        ),
        "qwen35moe": Architecture(
            "qwen3_5_moe_text",
            _QWEN35_KEYS | _MOE | _SHARED_EXPERT,
            names.QWEN35_MOE,
            _plus_one(names.QWEN35) | _QWEN35_CHANGES | _SHARED_GATE,
            own=own.qwen35,
        ),
        "gemma": Architecture("gemma", changes=_plus_one(names.LLAMA)),
        "gemma2": Architecture(
            "gemma2",
            _BASE | _SOFTCAPS | _WINDOW,
            names.GEMMA2,
            _plus_one(names.GEMMA2),
            own=partial(own.scaled_queries, 46),
            nulls=_NO_CAPS,
        ),
        "gemma3": Architecture(
            "gemma3_text",
            _BASE | _SOFTCAPS | _WINDOW,
            names.GEMMA3,
            _plus_one(names.GEMMA3),
            own=partial(own.scaled_queries, 62),
            nulls=_NO_CAPS,
            local_theta=10_000.0,
        ),
        "gemma4": Architecture(
            "gemma4_text",
            _QUERIES
            | _RMS
            | _FINAL_CAP
            | _WINDOW
            | {
                "embedding_length_per_layer_input": "hidden_size_per_layer_input",
                "expert_count": "num_experts",
                "expert_used_count": "top_k_experts",
                "expert_feed_forward_length": "moe_intermediate_size",
            },
            names.GEMMA4,
            own=own.gemma4,
            has_rope=False,
            nulls=tuple(_FINAL_CAP),
            gate_up="model.layers.{}.experts.gate_up_proj",
        ),
        "phi3": Architecture("phi3", _BASE | _WINDOW, names.PHI3, has_head_dim=False, nulls=_NO_WINDOW),
        "granite": Architecture(
            "granite",
            _BASE
            | {
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
            changes=_PAIRS,
            own=own.granite,
            has_head_dim=False,
        ),
        "starcoder2": Architecture(
            "starcoder2",
            _SIZES | {_LAYER_NORM: "norm_epsilon"},
            names.STARCODER2,
            has_head_dim=False,
            nulls=_NO_WINDOW,
        ),
        "olmo2": Architecture("olmo2", names=names.OLMO2, has_head_dim=False),
        "stablelm": Architecture(
            "stablelm",
            _SIZES | {_LAYER_NORM: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
            has_head_dim=False,
            attention_biases="use_qkv_bias",
        ),
        "nemotron": Architecture(
            "nemotron",
            _SIZES | {_LAYER_NORM: "norm_eps"},
            changes=_plus_one(names.LLAMA),
            attention_biases="attention_bias",
            mlp_biases=True,
        ),
        "smollm3": Architecture(
            "smollm3",
            changes=_PAIRS,
            own=partial(own.every_without_rope, 4),
            has_head_dim=False,
            attention_biases="attention_bias",
            mlp_biases=True,
        ),
        "command-r": Architecture(
            "cohere", _SIZES | {_LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"}, has_head_dim=False
        ),
        "gpt2": Architecture(
            "gpt2",
            {
                "context_length": "n_positions",
                "block_count": "n_layer",
                "embedding_length": "n_embd",
                "feed_forward_length": "n_inner",
                "attention.head_count": "n_head",
                _LAYER_NORM: "layer_norm_epsilon",
            },
            names.GPT2,
            {f"blk.{{}}.{one}.weight": Change.TRANSPOSED for one in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")},
            has_head_dim=False,
            has_rope=False,
        ),
        "gpt-oss": Architecture(
            "gpt_oss",
            _BASE | _LOCAL_EXPERTS | _WINDOW,
            names.GPT_OSS,
            {"blk.{}.ffn_down_exps.weight": Change.TRANSPOSED},
            own=own.gpt_oss,
            attention_biases="attention_bias",
            gates_by_turns=True,
        ),
        "minimax-m2": Architecture("minimax_m2", _BASE | _LOCAL_EXPERTS, names.MINIMAX_M2, own=own.minimax_m2),
        "lfm2": Architecture(
            "lfm2",
            _QUERIES | _WIDTH | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
            names.LFM2,
            {"blk.{}.shortconv.conv.weight": Change.NO_CHANNELS},
            own=own.lfm2,
            has_head_dim=False,
        ),
        "falcon": replace(
            _FALCON, variant=("blk.0.attn_norm_2.weight", replace(_FALCON, names=names.FALCON_TWO_NORMS))
        ),
        "bloom": Architecture(
            "bloom",
            _DEPTH
            | {
                "context_length": "seq_length",
                "block_count": "n_layer",
                "attention.head_count": "n_head",
                _LAYER_NORM: "layer_norm_epsilon",
            },
            names.BLOOM,
            _GROUPS,
            own=own.bloom,
            has_head_dim=False,
            has_rope=False,
        ),
        "mamba": replace(_MAMBA, variant=("ssm.dt_b_c_rms", replace(_MAMBA, model_type="falcon_mamba"))),
    }
)
