"""A mistake in a config as one sentence: the key, its value, and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from reprlib import Repr
from typing import Any

from pydantic import BaseModel, ValidationError

from mllm_compile.runtime.config_sections import SWITCHES


def describe_mistakes(error: ValidationError, config: type[BaseModel]) -> list[str]:
    """One sentence for each wrong key; the members of a union (`auto` or a number) are joined into one.

    Args:
        config: the model that was validated; it has a section a field.
    """
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for item in error.errors():
        key = tuple(str(part) for part in item["loc"])
        by_key.setdefault(key[: 3 if _fields_of(key[:2], config) else 2], []).append(item)
    return [_describe_mistake(key, items, config) for key, items in by_key.items()]


def _fields_of(key: tuple[str, ...], config: type[BaseModel]) -> Mapping[str, Any]:
    """The keys of a section, or of a section in one; of another key none."""
    section: Any = config
    for part in key:
        section = section.model_fields[part].annotation if part in getattr(section, "model_fields", ()) else None
    return getattr(section, "model_fields", {})


def _describe_mistake(key: tuple[str, ...], items: list[Any], config: type[BaseModel]) -> str:
    name = ".".join(key)
    kind = items[0]["type"]
    if kind == "extra_forbidden":
        return _describe_unknown_key(key, config)
    if kind == "missing":  # model, or its path: nothing else is without a default
        return "model.path is missing; give a hub id (Qwen/Qwen3-0.6B) or a local folder"
    if kind in ("model_type", "model_attributes_type"):
        if name == "model" and isinstance(items[0]["input"], str):
            return f"model is {show(items[0]['input'])}; expected model: {{path: {items[0]['input']}}}"
        return f"{name} is {show(items[0]['input'])}; expected keys: {', '.join(_fields_of(key, config))}"
    # A union reports every member that did not fit; the one that came furthest (an entry of a list, a range) has the
    # value that is really wrong.
    wrong = max(items, key=lambda item: len(item["loc"]))["input"]
    expected = " or ".join(dict.fromkeys(_expectation(item["msg"]) for item in items))
    return f"{name} is {show(wrong)}; expected {expected}"


# Names in vLLM and SGLang that are not similar to ours.
_NAMES_ELSEWHERE = {
    "gpu_memory_utilization": "runtime.mem_fraction_static",
    "max_num_seqs": "runtime.max_running_requests",
    "context_length": "runtime.max_model_len",
    "max_seq_len": "runtime.max_model_len",
    "block_size": "runtime.page_size",
    "chunked_prefill_size": "runtime.max_num_batched_tokens",
    "disable_cascade_attn": "runtime.cascade_attention: false",
    "enable_expert_parallel": "runtime.expert_parallel_size: 2",  # of as many ranks
    "enforce_eager": "cudagraph.mode: none",
    "disable_cuda_graph": "cudagraph.mode: none",
    "cudagraph_capture_sizes": "cudagraph.decode_requests",
    "cuda_graph_bs": "cudagraph.decode_requests",
    "tp": "runtime.tensor_parallel_size",
    "tp_size": "runtime.tensor_parallel_size",
    "pp": "runtime.pipeline_parallel_size",
    "pp_size": "runtime.pipeline_parallel_size",
    "ep_size": "runtime.expert_parallel_size",
    "enable_prefix_caching": "runtime.enable_prefix_cache",
    "no_enable_prefix_caching": "runtime.enable_prefix_cache: false",
    "disable_radix_cache": "runtime.enable_prefix_cache: false",
    "guided_decoding_backend": "structured_outputs.backend",
    "structured_outputs_config": "structured_outputs.backend",
    "grammar_backend": "structured_outputs.backend",
    "allowed_media_domains": "media.allowed_domains",
    "random_seed": "runtime.seed",
    "enable_deterministic_inference": "runtime.deterministic",
    "dp_size": "runtime.expert_parallel_size",
    "enable_lora": "lora.max_adapters",
    "max_loras": "lora.max_adapters",
    "max_loras_per_batch": "lora.max_adapters",
    "max_lora_rank": "lora.max_rank",
    "lora_target_modules": "lora.targets",
    "lora_modules": "lora.adapters",
    "lora_paths": "lora.adapters",
    "speculative_config": "speculative.method",
    "speculative_algorithm": "speculative.method",
    "speculative_model": "speculative.model",
    "speculative_draft_model_path": "speculative.model",
    "speculative_num_steps": "speculative.num_speculative_tokens",
    "speculative_num_draft_tokens": "speculative.num_speculative_tokens",
    "ngram_prompt_lookup_min": "speculative.prompt_lookup_min",
    "ngram_prompt_lookup_max": "speculative.prompt_lookup_max",
    "speculative_token_map": "speculative.token_map",
}

# Options of vLLM's that ask for what there is not.
_NOT_THERE = {
    "data_parallel_size": "an engine is one replica: serve several by --replicas, or spread a mixture's experts: "
    "runtime.expert_parallel_size",
    "all2all_backend": "tokens go to spread experts and back by NCCL",
    "disable_custom_all_reduce": "which sums over ranks are by kernels of ours is measured, not set (docs/parallel.md)",
    "enable_eplb": "spread experts stay where they are; runtime.expert_stats shows how unevenly they are chosen",
    "dbo_decode_token_threshold": "steps with prompts alone are divided: runtime.dbo_prefill_token_threshold",
    "data_parallel_size_local": "ranks are of one machine; runtime.expert_parallel_size spreads a mixture's experts",
    "num_speculative_tokens_per_batch_size": "num_speculative_tokens: auto finds the best one for each number of "
    "requests while it serves",
    "disable_by_batch_size": "num_speculative_tokens: auto drafts nothing where it does not pay",
    "speculative_eagle_topk": "a draft is one row of tokens, no tree: speculative.num_speculative_tokens",
    "rejection_sample_method": "the sampler chooses each token, so answers are those without drafts; "
    "synthetic_acceptance_length is for benchmarks",
    "cpu_offload_gb": "weights and KV cache lie on the device",
}


def _describe_unknown_key(key: tuple[str, ...], config: type[BaseModel]) -> str:
    sections = {name: field.annotation.model_fields for name, field in config.model_fields.items()}  # type: ignore[union-attr]
    listed = f"`mllm-compile config {key[0]}` shows all of them"
    if len(key) == 1:
        # A key that was written without its section, such as `device: cpu` at the top level, is found in its section.
        meant = closest(key[0], list(sections)) or key_meant_by(key[0], config)
        listed = f"known sections: {', '.join(sections)}"
    elif len(key) > 2:
        near = closest(key[2], list(_fields_of(key[:2], config)))
        return f"{'.'.join(key)} is not a known key{f'; did you mean {near}?' if near else ''} ({listed})"
    else:
        near = closest(key[1], list(sections[key[0]]))
        meant = f"{key[0]}.{near}" if near else None
    meant = _NAMES_ELSEWHERE.get(key[-1], meant)
    if key[-1] in SWITCHES:
        return (
            f"{'.'.join(key)} is not a known key: {key[-1]} is in use wherever it serves. To leave it out, set "
            f"runtime.without: [{key[-1]}]"
        )
    if key[-1] in _NOT_THERE:
        return f"{'.'.join(key)} is not a known key: {_NOT_THERE[key[-1]]}"
    hint = f"; did you mean {meant}?" if meant else ""
    return f"{'.'.join(key)} is not a known key{hint} ({listed})"


def key_meant_by(name: str, config: type[BaseModel]) -> str | None:
    """The key, with its section, that `name` means here, in vLLM or in SGLang; None for an unknown name."""
    sections = _keys_by_section(config)
    similar = (f"{section}.{near}" for section, keys in sections.items() if (near := closest(name, keys)))
    return key_named(name, config) or next(similar, None)


def key_named(name: str, config: type[BaseModel]) -> str | None:
    """The key, with its section, that has this name here, in vLLM or in SGLang; None where none has."""
    same = (f"{section}.{name}" for section, keys in _keys_by_section(config).items() if name in keys)
    return _NAMES_ELSEWHERE.get(name) or next(same, None)


def _keys_by_section(config: type[BaseModel]) -> dict[str, list[str]]:
    return {section: list(field.annotation.model_fields) for section, field in config.model_fields.items()}  # type: ignore[union-attr]


def not_there(name: str) -> str | None:
    """The reason why vLLM's option of this name has no counterpart; None for an unknown name."""
    return _NOT_THERE.get(name)


def closest(name: str, known: list[str]) -> str | None:
    """Returns the most similar of the `known` names, or None."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def _expectation(message: str) -> str:
    """Turns Pydantic's message into the rest of 'expected …'."""
    for start in ("Value error, ", "Input should be ", "Input should "):
        message = message.removeprefix(start)
    return message.replace("a valid tuple", "a list")


def show(value: Any) -> str:
    """Returns a value's repr, cut where it is long."""
    text = _SHORT.repr(value)  # a few aliases of a YAML may expand to more than memory holds
    return text if len(text) <= 80 else f"{text[:77]}..."


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 100
