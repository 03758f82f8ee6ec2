"""The architectures of GGUF files that are read: names of tensors and keys, as llama.cpp and Transformers have them.

Facts: constants.py and tensor_mapping.py of the package gguf, and llama.cpp's converters, which permute the rows of
rotary weights and add one to some norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# Names without `.weight` or `.bias`; {} is the layer's number.
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    f"blk.{{}}.attn_{ours}": f"model.layers.{{}}.self_attn.{theirs}_proj"
    for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
}
_HEAD_NORMS = {f"blk.{{}}.attn_{one}_norm": f"model.layers.{{}}.self_attn.{one}_norm" for one in ("q", "k")}
_MLP = {f"blk.{{}}.ffn_{one}": f"model.layers.{{}}.mlp.{one}_proj" for one in ("gate", "up", "down")}
_NORMS = {
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
}
_FOUR_NORMS = {
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
_LLAMA = _ENDS | _ATTENTION | _MLP | _NORMS
_EXPERTS = {"blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate"}
_SHARED_EXPERT = {
    **{
        f"blk.{{}}.ffn_{one}_shexp": f"model.layers.{{}}.mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")
    },
    "blk.{}.ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "transformer.h.{}.ln_1",
    "blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn",
    "blk.{}.attn_output": "transformer.h.{}.attn.c_proj",
    "blk.{}.ffn_norm": "transformer.h.{}.ln_2",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc",
    "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj",
}

# Keys behind `ARCHITECTURE.`, and their names in config.json.
_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_BASE = _SIZES | _RMS
_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_NO_CAPS = tuple(_SOFTCAPS)
_NO_WINDOW = ("sliding_window",)
_WINDOW = {"attention.sliding_window": "sliding_window"}


@dataclass(frozen=True)
class Architecture:
    """
    Attributes:
        model_type: Transformers' name.
        keys: metadata's keys without the architecture → keys of config.json.
        names: tensors without their suffix → the model's.
        values: what config.json says beside that.
        has_head_dim: config.json names the size of a head.
        permutes: rows of q and k are in pairs, as rotary embeddings of pairs want them.
        adds_one: norms are stored with one added.
        transposes: matrices of the layers are the other way round in the model.
        has_experts: a layer's experts are one tensor.
        has_rope: positions turn the queries and keys.
        attention_biases: the key of config.json that says if q, k and v have biases, or None.
        mlp_biases: config.json says if the MLP has biases.
        nulls: keys of config.json that are null where the file does not say them, as the class has another default.
        wide_layers: the number of layers of the one model whose queries are scaled by hidden size over heads; others of
            the architecture scale by the size of a head. None: config.json has no such scale.
        every_without_rope: each so many layers one has no rotary embedding; 0: all have one.
        with_experts: what a file with experts is; None: the same.
        local_theta: the rotary base of layers with a window; None: all layers have one base.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _BASE)
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    values: Mapping[str, object] = field(default_factory=dict)
    has_head_dim: bool = True
    permutes: bool = False
    adds_one: bool = False
    transposes: bool = False
    has_experts: bool = False
    has_rope: bool = True
    attention_biases: str | None = None
    mlp_biases: bool = False
    nulls: tuple[str, ...] = ()
    wide_layers: int | None = None
    every_without_rope: int = 0
    local_theta: float | None = None
    with_experts: Architecture | None = None


_GEMMA = _LLAMA | _FOUR_NORMS
_STARCODER2 = {
    **{name: theirs for name, theirs in _LLAMA.items() if "ffn_gate" not in name},
    "blk.{}.ffn_up": "model.layers.{}.mlp.c_fc",
    "blk.{}.ffn_down": "model.layers.{}.mlp.c_proj",
}
_PHI3 = {
    **_LLAMA,
    "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
}
_OLMO2 = {
    **_ENDS,
    **_ATTENTION,
    **_HEAD_NORMS,
    **_MLP,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
_LAYER_NORM = "attention.layer_norm_epsilon"

_MIXTRAL = Architecture(
    "mixtral",
    _BASE | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    _LLAMA | _EXPERTS,
    permutes=True,
    has_experts=True,
)

# By `general.architecture`.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            "llama", permutes=True, attention_biases="attention_bias", mlp_biases=True, with_experts=_MIXTRAL
        ),
        "qwen2": Architecture("qwen2", has_head_dim=False, nulls=_NO_WINDOW),
        "qwen3": Architecture("qwen3", names=_LLAMA | _HEAD_NORMS, attention_biases="attention_bias"),
        "qwen2moe": Architecture(
            "qwen2_moe",
            _BASE | _MOE | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            _LLAMA | _EXPERTS | _SHARED_EXPERT,
            {"norm_topk_prob": False},
            has_head_dim=False,
            has_experts=True,
        ),
        "qwen3moe": Architecture(
            "qwen3_moe", _BASE | _MOE, _LLAMA | _HEAD_NORMS | _EXPERTS, {"norm_topk_prob": True}, has_experts=True
        ),
        "gemma": Architecture("gemma", adds_one=True),
        "gemma2": Architecture(
            "gemma2", _BASE | _SOFTCAPS | _WINDOW, _GEMMA, adds_one=True, nulls=_NO_CAPS, wide_layers=46
        ),
        "gemma3": Architecture(
            "gemma3_text",
            _BASE | _SOFTCAPS | _WINDOW,
            _GEMMA | _HEAD_NORMS,
            adds_one=True,
            nulls=_NO_CAPS,
            wide_layers=62,
            local_theta=10_000.0,
        ),
        "phi3": Architecture("phi3", _BASE | _WINDOW, _PHI3, has_head_dim=False, nulls=_NO_WINDOW),
        "granite": Architecture(
            "granite",
            _BASE
            | {
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
            has_head_dim=False,
            permutes=True,
        ),
        "starcoder2": Architecture(
            "starcoder2", _SIZES | {_LAYER_NORM: "norm_epsilon"}, _STARCODER2, has_head_dim=False, nulls=_NO_WINDOW
        ),
        "olmo2": Architecture("olmo2", names=_OLMO2, has_head_dim=False),
        "stablelm": Architecture(
            "stablelm",
            _SIZES | {_LAYER_NORM: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
            has_head_dim=False,
            attention_biases="use_qkv_bias",
        ),
        "nemotron": Architecture(
            "nemotron",
            _SIZES | {_LAYER_NORM: "norm_eps"},
            adds_one=True,
            attention_biases="attention_bias",
            mlp_biases=True,
        ),
        "smollm3": Architecture(
            "smollm3",
            has_head_dim=False,
            permutes=True,
            attention_biases="attention_bias",
            mlp_biases=True,
            every_without_rope=4,
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
            _GPT2,
            has_head_dim=False,
            transposes=True,
            has_rope=False,
        ),
    }
)
