"""The values of config.json that single architectures have: each function adds one architecture's.

Facts: llama.cpp's converters and its loading of hyperparameters.
"""

from __future__ import annotations

from typing import Any

from mllm_compile.gguf.facts import ModelFacts

Config = dict[str, Any]
_SIGMOID = 2  # of expert_gating_func
_NEVER_TURNS = 1e29  # from this factor of rope_freqs on the frequency is next to nothing


def same_experts(facts: ModelFacts, config: Config) -> None:
    """Experts are as wide as the key of the MLP says."""
    if facts.number("expert_feed_forward_length") not in (None, config["intermediate_size"]):
        raise facts.misfit("expert_feed_forward_length", f"feed_forward_length is {config['intermediate_size']}")


def gpt_oss(facts: ModelFacts, config: Config) -> None:
    same_experts(facts, config)
    if "factor" in config["rope_parameters"]:
        config["rope_parameters"]["truncate"] = False


def minimax_m2(facts: ModelFacts, config: Config) -> None:
    same_experts(facts, config)
    if facts.number("expert_gating_func") not in (None, _SIGMOID):
        raise facts.unsupported("expert_gating_func", f"{_SIGMOID}, sigmoid")


def qwen35(facts: ModelFacts, config: Config) -> None:
    """One layer of some attends; the last layers of the file may predict further tokens, which are left out."""
    facts.metadata.numbers(f"{facts.name}.rope.dimension_sections", 4)  # of positions of images
    layers = int(config["num_hidden_layers"]) - int(facts.number("nextn_predict_layers") or 0)
    every, heads = int(facts.needed("full_attention_interval")), int(config["linear_num_value_heads"])
    inner = int(facts.needed("ssm.inner_size"))
    if every < 1 or heads < 1 or inner % heads:
        raise facts.misfit("ssm.inner_size", f"ssm.time_step_rank is {heads}, full_attention_interval {every}")
    config["num_hidden_layers"] = layers
    config["linear_value_head_dim"] = inner // heads
    config["layer_types"] = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def scaled_queries(wide_layers: int, facts: ModelFacts, config: Config) -> None:
    """Queries of one size of the models, which has so many layers, are scaled by hidden size over heads; of others by
    the size of a head."""
    is_wide = config["num_hidden_layers"] == wide_layers
    usual = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = usual if is_wide else config["head_dim"]


def every_without_rope(every: int, facts: ModelFacts, config: Config) -> None:
    """One layer of so many has no rotary embedding."""
    layers = config["num_hidden_layers"]
    config["no_rope_layers"] = [int((layer + 1) % every != 0) for layer in range(layers)]


def granite(facts: ModelFacts, config: Config) -> None:
    size = config["hidden_size"] // config["num_attention_heads"]
    config.setdefault("attention_multiplier", size**-0.5)


def bloom(facts: ModelFacts, config: Config) -> None:
    """The class has no key for the MLP's width, nor for KV heads."""
    for key, size in (
        ("feed_forward_length", 4 * config["hidden_size"]),
        ("attention.head_count_kv", config["n_head"]),
    ):
        if facts.number(key) not in (None, size):
            raise facts.unsupported(key, str(size))


def falcon(facts: ModelFacts, config: Config) -> None:
    """The first models have one key for all queries, later ones have groups, and layers with one norm or two."""
    has_groups, has_two_norms = config["num_kv_heads"] > 1, facts.has("blk.0.attn_norm_2.weight")
    if has_two_norms and not has_groups:
        raise facts.unsupported("attention.head_count_kv", "several KV heads, as layers have two norms")
    config["new_decoder_architecture"] = has_groups
    config["num_ln_in_parallel_attn"] = 2 if has_two_norms else 1


def mamba(facts: ModelFacts, config: Config) -> None:
    """Keys that llama.cpp needs, and that say nothing."""
    for key in ("context_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv"):
        facts.number(key)
    config["use_conv_bias"] = facts.has("blk.0.ssm_conv1d.bias")
    config["use_bias"] = facts.has("blk.0.ssm_in.bias")


def lfm2(facts: ModelFacts, config: Config) -> None:
    """Layers without KV heads are convolutions."""
    heads = facts.each_layer("attention.head_count_kv")
    if not max(heads) or len({*heads} - {0}) > 1:
        raise facts.unsupported("attention.head_count_kv", "one number for all layers that attend")
    config["num_key_value_heads"] = max(heads)
    config["layer_types"] = ["full_attention" if one else "conv" for one in heads]
    config["block_auto_adjust_ff_dim"] = False
    config["conv_bias"] = facts.has("blk.0.shortconv.in_proj.bias")


def gemma4(facts: ModelFacts, config: Config) -> None:
    layers = int(config["num_hidden_layers"])
    is_local = [bool(one) for one in facts.each_layer("attention.sliding_window_pattern")]
    config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in is_local]
    shared = int(facts.number("attention.shared_kv_layers") or 0)
    config["num_kv_shared_layers"] = shared
    _gemma4_widths(facts, config, layers - shared)
    _gemma4_heads(facts, config, is_local)
    _gemma4_rope(facts, config)
    config["enable_moe_block"] = facts.has("blk.0.ffn_gate_inp.weight")
    if facts.has("per_layer_token_embd.weight"):
        config["vocab_size_per_layer_input"] = facts.shape("per_layer_token_embd.weight")[0]


def _gemma4_widths(facts: ModelFacts, config: Config, first_shared: int) -> None:
    """Layers that take keys of others may have MLPs of twice the width."""
    widths = facts.each_layer("feed_forward_length")
    config["intermediate_size"] = widths[0]
    config["use_double_wide_mlp"] = len({*widths}) > 1
    factor = 2 if config["use_double_wide_mlp"] else 1
    if any(one != widths[0] * (factor if index >= first_shared else 1) for index, one in enumerate(widths)):
        raise facts.unsupported("feed_forward_length", "twice the width for layers with shared keys, or one width")


def _gemma4_heads(facts: ModelFacts, config: Config, is_local: list[bool]) -> None:
    """Layers with a window have heads of their own size and number, and the others may have no values but keys."""
    config["global_head_dim"] = facts.needed("attention.key_length")
    config["head_dim"] = facts.needed("attention.key_length_swa")
    if facts.number("attention.value_length_swa") not in (None, config["head_dim"]):
        raise facts.misfit("attention.value_length_swa", f"attention.key_length_swa is {config['head_dim']}")
    heads = facts.each_layer("attention.head_count_kv")
    local = {one for one, here in zip(heads, is_local, strict=True) if here}
    others = {one for one, here in zip(heads, is_local, strict=True) if not here}
    if len(local) > 1 or len(others) != 1:
        raise facts.unsupported("attention.head_count_kv", "one number for layers with a window, and one for others")
    config["num_key_value_heads"] = next(iter(local or others))
    config["num_global_key_value_heads"] = next(iter(others))
    full = is_local.index(False)
    config["attention_k_eq_v"] = not facts.has(f"blk.{full}.attn_v.weight")


def _gemma4_rope(facts: ModelFacts, config: Config) -> None:
    """Layers with a window turn all of a head; in others the frequencies of rope_freqs that are 1 do."""
    half = config["global_head_dim"] // 2
    factors = facts.numbers("rope_freqs.weight", half)
    turning = factors.count(1.0)
    part = turning / half
    is_known = all(one >= _NEVER_TURNS for one in factors[turning:])
    if not is_known or int(part * config["global_head_dim"] // 2) != turning:  # as Transformers computes it
        raise facts.unsupported("rope.dimension_count", "rope_freqs of ones, then of 1e30")
    for key, size in (("rope.dimension_count", "global_head_dim"), ("rope.dimension_count_swa", "head_dim")):
        if facts.number(key) not in (None, config[size]):
            raise facts.unsupported(key, f"{config[size]}, the size of a head")
    config["rope_parameters"] = {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": part,
            "rope_theta": float(facts.needed("rope.freq_base")),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": float(facts.number("rope.freq_base_swa") or 10_000.0),
        },
    }
