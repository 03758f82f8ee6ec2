"""Tiny random models of any causal-LM architecture of Transformers, for tests and the survey.

A config is the architecture's own default with every size made small. Windows are shorter than the test's texts, layer
kinds alternate, weights are large enough that attention is far from uniform: what is served wrong shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 128
FIRST_SPECIAL_TOKEN = 100  # texts of tests are made of the tokens below
WINDOW = 8
LAYERS = 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    # Width
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "emb_dim": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "attention_hidden_size": 64,
    "lru_width": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "d_ff": 96,
    "dff": 96,
    "d_inner": 96,
    # Depth
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_layers": 2,
    # Attention
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "kv_channels": 16,
    "attention_head_dim": 16,
    "rotary_dim": 8,
    "sliding_window": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 64,  # as many keys as a text of the survey has
    "index_n_heads": 2,
    "index_head_dim": 16,
    # Experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    # Recurrent layers
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 16,
    "state_size": 8,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Latent attention: rotary dimensions are a head's own, and every head has its keys.
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}

# Settings that make heads as wide as they are.
_OF_HEADS = frozenset(
    {
        *("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim"),
        *("attention_hidden_size", "lru_width", "num_attention_heads", "n_head", "n_heads"),
        *("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads", "num_kv_heads", "head_dim"),
        *("kv_channels", "attention_head_dim", "rotary_dim", "q_lora_rank", "kv_lora_rank"),
        *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attn_config", "index_head_dim", "index_n_heads"),
        *("mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim", "mamba_d_ssm", "mamba_headdim"),
        *("n_mamba_heads", "num_heads", "linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim", "n_groups"),
    }
)

# Configs of parts, whose small sizes stay beside what an architecture needs of them.
_OF_PARTS = frozenset({"text_config", "vision_config", "audio_config", "encoder_config", "decoder_config"})

_OF_DEPTH = frozenset(
    {
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
        *("layer_types", "mlp_layer_types"),
    }
)

_BERT = {"is_decoder": True}
_BLT = {"hidden_size_global": 64}
_QWEN4 = {
    "ngram_vocab_size_base": 256,
    "split_ngram_parts": 2,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 32,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,  # as many keys as a text of the survey has
    "indexer_compress_ratio": 4,
    "eos_token_id": FIRST_SPECIAL_TOKEN,
}
# Needs of an architecture besides small sizes: a check of its config, or its most telling kind of layer.
_OF_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "bert": _BERT,
    "blt": {"encoder_config": _BLT, "decoder_config": _BLT},
    "bert-generation": _BERT,
    "big_bird": _BERT | {"attention_type": "original_full"},
    "camembert": _BERT,
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        }
    },
    "data2vec-text": _BERT,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "electra": _BERT,
    "ernie": _BERT,
    "emu3": {"vocabulary_map": {"<|extra_200|>": 1, "<image>": 2}},
    "falcon": {"new_decoder_architecture": True},
    "gemma3n_text": {"num_kv_shared_layers": 2, "laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "megatron-bert": _BERT,
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention", "mlp", "moe"]},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "rembert": _BERT | {"input_embedding_size": 32, "output_embedding_size": 32},
    "roberta": _BERT,
    "roberta-prelayernorm": _BERT,
    "roc_bert": _BERT
    | {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": VOCAB,
        "shape_embed_dim": 16,
        "shape_vocab_size": VOCAB,
    },
    "roformer": _BERT,
    "rwkv": {"rescale_every": 2},
    "xlm-roberta": _BERT,
    "xlm-roberta-xl": _BERT,
    "xmod": _BERT | {"default_language": "en_XX"},
    "xlstm": {"hidden_size": 128, "num_heads": 4},  # its cache rounds heads up to what 64 is a multiple of
    "zamba": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "adapter_rank": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def causal_lm_types() -> list[str]:
    """Every architecture that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The architecture's config with small sizes; `changes` win.

    Raises:
        Exception: whatever the config's own checks say of sizes that do not fit together.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_special_sizes(model_type, _small_sizes(config_class())) | changes)


def config_with_heads(model_type: str, is_shallow: bool) -> Any:
    """The architecture's config with the heads of its default one, and few layers; the first two, if it `is_shallow`.

    Raises:
        Exception: as tiny_config.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    special = _OF_ARCHITECTURE.get(model_type, {})
    of_heads = _without_heads(_special_sizes(model_type, _small_sizes(config_class())), is_shallow and not special)
    return config_class(**of_heads)


def _without_heads(sizes: dict[str, Any], is_shallow: bool) -> dict[str, Any]:
    kept = {name: size for name, size in sizes.items() if name not in _OF_HEADS}
    for name, size in kept.items():
        if isinstance(size, dict) and name != "rope_parameters":
            kept[name] = _without_heads(size, is_shallow)
        elif is_shallow and name in _OF_DEPTH:
            kept[name] = size[: LAYERS // 2] if isinstance(size, list) else LAYERS // 2
    return kept


def _special_sizes(model_type: str, small: dict[str, Any]) -> dict[str, Any]:
    """The sizes with what an architecture needs besides, in configs of its parts too."""
    special = _OF_ARCHITECTURE.get(model_type, {})
    merged = {name: small[name] | special[name] for name in special if name in _OF_PARTS}
    return small | special | merged


def save_tiny_model(config: Any, folder: Path, seed: int = 0, **save_options: Any) -> Any:
    """Writes a random float32 model of `config` in Hugging Face's format; returns the model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, **save_options)
    return model


def _small_sizes(config: Any) -> dict[str, Any]:
    own = config.to_dict()
    known = set(own) | set(config.attribute_map)
    small = {name: size for name, size in _SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:
        small |= {name: size for name, size in _LATENT.items() if name in known}
    tokens = [name for name in sorted(known) if name.endswith(("_token_id", "_token_index"))]
    small |= {name: FIRST_SPECIAL_TOKEN + number for number, name in enumerate(tokens) if getattr(config, name, None)}
    for name in ("layer_types", "mlp_layer_types"):
        kinds = sorted(set(own.get(name) or ()), reverse=True)
        if kinds == ["full_attention"] and "sliding_window" in known:
            kinds = ["sliding_attention", "full_attention"]
        if kinds:
            small[name] = [kinds[index % len(kinds)] for index in range(LAYERS)]
    for name in config.sub_configs:
        if hasattr(getattr(config, name, None), "to_dict"):
            small[name] = _small_sizes(getattr(config, name))
    return small
