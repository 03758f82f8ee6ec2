"""Sizes of small models for GPU tests; their weights are random."""

from __future__ import annotations

# Heads of 128, as models have them, for a tiny model: FlashInfer would compile kernels for smaller ones for minutes.
WIDE = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
# Cascades are compiled where decodes are captured alone: without them one runtime serves in every mode of graphs.
ONE_RUNTIME = {"cascade_attention": False}
# config.json of a Qwen3 whose every width suits the kernels for few tokens.
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
