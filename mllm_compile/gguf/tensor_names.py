"""The names of tensors, as llama.cpp has them, and Transformers' for the same.

Names have no `.weight` or `.bias`, which stay; {} is the layer's number. A tensor whose end differs is listed with it.
Facts: constants.py and tensor_mapping.py of the package gguf.
"""

from __future__ import annotations

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    f"blk.{{}}.attn_{ours}": f"model.layers.{{}}.self_attn.{theirs}_proj"
    for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
}
HEAD_NORMS = {f"blk.{{}}.attn_{one}_norm": f"model.layers.{{}}.self_attn.{one}_norm" for one in ("q", "k")}
MLP = {f"blk.{{}}.ffn_{one}": f"model.layers.{{}}.mlp.{one}_proj" for one in ("gate", "up", "down")}
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
LLAMA = ENDS | ATTENTION | MLP | _NORMS
# Gate and up of experts make one tensor (Architecture.gate_up).
EXPERTS = {
    "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate",
    "blk.{}.ffn_down_exps.weight": "model.layers.{}.mlp.experts.down_proj",
}
SHARED_EXPERT = {
    **{
        f"blk.{{}}.ffn_{one}_shexp": f"model.layers.{{}}.mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")
    },
    "blk.{}.ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
}
GEMMA2 = LLAMA | _FOUR_NORMS
GEMMA3 = GEMMA2 | HEAD_NORMS
STARCODER2 = {
    **{name: theirs for name, theirs in LLAMA.items() if "ffn_gate" not in name},
    "blk.{}.ffn_up": "model.layers.{}.mlp.c_fc",
    "blk.{}.ffn_down": "model.layers.{}.mlp.c_proj",
}
PHI3 = {
    **LLAMA,
    "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
}
OLMO2 = {
    **ENDS,
    **ATTENTION,
    **HEAD_NORMS,
    **MLP,
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
GPT2 = {
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
FALCON = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "transformer.h.{}.input_layernorm",
    "blk.{}.attn_qkv": "transformer.h.{}.self_attention.query_key_value",
    "blk.{}.attn_output": "transformer.h.{}.self_attention.dense",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.dense_h_to_4h",
    "blk.{}.ffn_down": "transformer.h.{}.mlp.dense_4h_to_h",
}
FALCON_TWO_NORMS = FALCON | {
    "blk.{}.attn_norm": "transformer.h.{}.ln_mlp",
    "blk.{}.attn_norm_2": "transformer.h.{}.ln_attn",
}
BLOOM = FALCON | {
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "blk.{}.ffn_norm": "transformer.h.{}.post_attention_layernorm",
}
MAMBA = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "backbone.layers.{}.norm",
    "blk.{}.ssm_in": "backbone.layers.{}.mixer.in_proj",
    "blk.{}.ssm_conv1d": "backbone.layers.{}.mixer.conv1d",
    "blk.{}.ssm_x": "backbone.layers.{}.mixer.x_proj",
    "blk.{}.ssm_dt": "backbone.layers.{}.mixer.dt_proj",
    "blk.{}.ssm_a": "backbone.layers.{}.mixer.A_log",
    "blk.{}.ssm_d": "backbone.layers.{}.mixer.D",
    "blk.{}.ssm_out": "backbone.layers.{}.mixer.out_proj",
}
LFM2 = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    **ATTENTION,
    "blk.{}.attn_output": "model.layers.{}.self_attn.out_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_layernorm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_layernorm",
    "blk.{}.attn_norm": "model.layers.{}.operator_norm",
    "blk.{}.ffn_norm": "model.layers.{}.ffn_norm",
    "blk.{}.ffn_gate": "model.layers.{}.feed_forward.w1",
    "blk.{}.ffn_up": "model.layers.{}.feed_forward.w3",
    "blk.{}.ffn_down": "model.layers.{}.feed_forward.w2",
    **{f"blk.{{}}.shortconv.{one}": f"model.layers.{{}}.conv.{one}" for one in ("conv", "in_proj", "out_proj")},
}
GPT_OSS = {
    **ENDS,
    **ATTENTION,
    "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.router",
    "blk.{}.ffn_down_exps.weight": "model.layers.{}.mlp.experts.down_proj",
    "blk.{}.ffn_down_exps.bias": "model.layers.{}.mlp.experts.down_proj_bias",
}
_FUSED_EXPERTS = {"blk.{}.ffn_gate_up_exps.weight": "model.layers.{}.mlp.experts.gate_up_proj"}
QWEN35 = {
    **ENDS,
    **ATTENTION,
    **HEAD_NORMS,
    **MLP,
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_qkv": "model.layers.{}.linear_attn.in_proj_qkv",
    "blk.{}.attn_gate": "model.layers.{}.linear_attn.in_proj_z",
    "blk.{}.ssm_alpha": "model.layers.{}.linear_attn.in_proj_a",
    "blk.{}.ssm_beta": "model.layers.{}.linear_attn.in_proj_b",
    "blk.{}.ssm_conv1d": "model.layers.{}.linear_attn.conv1d",
    "blk.{}.ssm_dt.bias": "model.layers.{}.linear_attn.dt_bias",
    "blk.{}.ssm_a": "model.layers.{}.linear_attn.A_log",
    "blk.{}.ssm_norm": "model.layers.{}.linear_attn.norm",
    "blk.{}.ssm_out": "model.layers.{}.linear_attn.out_proj",
}
QWEN35_MOE = QWEN35 | EXPERTS | _FUSED_EXPERTS | SHARED_EXPERT
MINIMAX_M2 = {
    **LLAMA,
    **HEAD_NORMS,
    **EXPERTS,
    "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.e_score_correction_bias",
}
GEMMA4 = {
    **GEMMA3,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "blk.{}.inp_gate": "model.layers.{}.per_layer_input_gate",
    "blk.{}.proj": "model.layers.{}.per_layer_projection",
    "blk.{}.post_norm": "model.layers.{}.post_per_layer_input_norm",
    "blk.{}.layer_output_scale.weight": "model.layers.{}.layer_scalar",
    "blk.{}.ffn_gate_inp": "model.layers.{}.router.proj",
    "blk.{}.ffn_gate_inp.scale": "model.layers.{}.router.scale",
    "blk.{}.ffn_gate_up_exps.weight": "model.layers.{}.experts.gate_up_proj",
    "blk.{}.ffn_down_exps.weight": "model.layers.{}.experts.down_proj",
    "blk.{}.ffn_down_exps.scale": "model.layers.{}.router.per_expert_scale",
    "blk.{}.pre_ffw_norm_2": "model.layers.{}.pre_feedforward_layernorm_2",
    "blk.{}.post_ffw_norm_1": "model.layers.{}.post_feedforward_layernorm_1",
    "blk.{}.post_ffw_norm_2": "model.layers.{}.post_feedforward_layernorm_2",
}
