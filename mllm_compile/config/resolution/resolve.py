"""Makes a ResolvedConfig from the config, the model's folder and the device: every `auto` becomes a value, once.

No value changes after this, and all code below reads this and never an `auto`. Each choice is kept with its
reason, to be printed. The numbers behind `auto` are the tables at the top.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.folders.own_adapters import OF_SOUNDS, adapter_of_sounds
from mllm_compile.config.folders.prediction_layer import num_prediction_layers
from mllm_compile.config.resolution.attention import (
    has_hopper_decode,
    has_split_decode,
    resolve_attention_backend,
    resolve_cascade_attention,
    resolve_kv_cache_dtype,
)
from mllm_compile.config.resolution.deterministic import (
    DETERMINISTIC_ANY_TOKENS,
    deterministic_tokens,
    has_any_rows,
    resolve_max_step_ms,
)
from mllm_compile.config.resolution.device import DeviceInfo, has_amx
from mllm_compile.config.resolution.graphs import resolve_graphs
from mllm_compile.config.resolution.quantisation import checked_head, resolve_quantization
from mllm_compile.config.resolution.sparse_keys import check_chosen_keys, full_length
from mllm_compile.config.resolution.task import check_encoder_decoder, has_encoder, resolve_task
from mllm_compile.config.resolution.tiers import check_tiers, kv_transfer, write_policy
from mllm_compile.config.resolved import (
    AutoChoices,
    ResolvedCache,
    ResolvedCompile,
    ResolvedConfig,
    ResolvedMedia,
    ResolvedModel,
    ResolvedStructuredOutputs,
)
from mllm_compile.config.schema import EngineConfig, LoraConfig, StructuredOutputsConfig
from mllm_compile.config.schema_runtime import RuntimeConfig
from mllm_compile.config.schema_speculative import SpeculativeConfig
from mllm_compile.errors import ConfigError
from mllm_compile.files.cache_folders import auto_cache_dir
from mllm_compile.files.user_path import user_path
from mllm_compile.runtime.config_sections import (
    BackendName,
    KVEventsSection,
    LoraSection,
    RuntimeSection,
    SpeculativeMethod,
    SpeculativeSection,
)

# Attention is as fast with pages of 64 as with 16, and the page table is a quarter of it. A CPU gains nothing from
# large pages, and small ones share more of a prefix.
PAGE_SIZE = {"flashinfer": 64, "torch": 16}
# A CPU computes a few hundred tokens a second: more in flight would only make each of them later.
MAX_RUNNING_REQUESTS = {"cuda": 256, "cpu": 64}
MAX_NUM_BATCHED_TOKENS = {"cuda": 8192, "cpu": 2048}
# Used where 8192 tokens are fewer rows of an expert than this, as with 8 of 128. The kernels take 64 rows at a time,
# the last ones in part, and read a weight again for each 256. Twice the tokens take 1.73 times as long there on an
# H100.
_FEW_ROWS_OF_EXPERT = 1024
TOKENS_OF_SMALL_EXPERTS = 16384
# The table of slots takes max_running_requests × max_model_len × 4 bytes: 64 MiB at 256 × 65536.
MAX_MODEL_LEN = {"cuda": 65536, "cpu": 8192}
# A YAML may be for a GPU and serve on a CPU too: these are told, not refused.
_KEYS_OF_GPUS = {
    "runtime": ("mem_fraction_static", "without"),
    "cudagraph": ("piecewise_tokens", "decode_requests", "mixed_tokens"),
}
_SWITCHES_OF_CPUS = ("paged_attention",)
# llguidance is first: it bounds the work of every mask, refuses what it would not keep to, and imports little.
# XGrammar takes structural tags, and what is too large for it.
STRUCTURE_BACKENDS = ("llguidance", "xgrammar")
METHOD_KEY = "speculative.method"
METHOD_WITHOUT_WEIGHTS: SpeculativeMethod = "suffix"
_LENGTH_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length"),
    "max_target_positions",
)
_BUCKETS_KEY = "relative_attention_num_buckets"  # of a bias by distance, which has no last position


def resolve(config: EngineConfig, model: ModelFolder, device: DeviceInfo) -> ResolvedConfig:
    """Replaces every `auto` and checks what only shows when the parts meet.

    Args:
        config: the user's config.
        model: the checked folder of config.model.
        device: `detect_device(config.runtime.device)`.

    Raises:
        ConfigError: values that contradict each other, the model or the device.
        CaptureSizeError: a CUDA graph size that no batch can have.
        DeviceError: the device lacks the attention library.
    """
    choices = AutoChoices()
    dtype = choices.resolve("model.dtype", config.model.dtype, lambda: _auto_dtype(config, model, device))
    task = resolve_task(config, model, choices)
    if task == "generate" and has_encoder(model):
        check_encoder_decoder(config)
    backend = resolve_attention_backend(config.runtime, dtype, device, task, choices)
    runtime = _runtime(config, dtype, backend, model, device, choices)
    _check_sparse_activations(runtime, model)
    split_decode = has_split_decode(config.compile, runtime, dtype, device)
    pools = task != "generate"
    graphs = resolve_graphs(config.cudagraph, runtime, split_decode, device, model, choices, pools)
    runtime = replace(
        runtime,
        cascade_attention=resolve_cascade_attention(config.runtime, runtime, split_decode, graphs, dtype, choices),
    )
    return ResolvedConfig(
        model=ResolvedModel(
            source=config.model.path,
            folder=str(model.path),
            revision=config.model.revision,
            dtype=dtype,
            load_format=choices.resolve(
                "model.load_format", config.model.load_format, lambda: ("safetensors", "the checkpoint's format")
            ),
            quantization=resolve_quantization(config, model, device, dtype, task, choices),
            lm_head_quantization=checked_head(config),
            trust_remote_code=config.model.trust_remote_code,
            split_special_tokens=config.model.split_special_tokens,
            task=task,
            classifier_from_token=config.model.classifier_from_token,
            has_encoder=task == "generate" and has_encoder(model),
            score_template=config.model.score_template,
        ),
        compile=ResolvedCompile(
            backend=config.compile.backend,
            disable_passes=config.compile.disable_passes,
            split_decode=split_decode,
            hopper_decode=split_decode and has_hopper_decode(runtime, dtype, device),
        ),
        cudagraph=graphs,
        runtime=runtime,
        speculative=_speculative(config.speculative, model, runtime, choices),
        lora=_lora(config.lora, runtime, model),
        structured_outputs=_structured_outputs(config.structured_outputs, choices),
        media=ResolvedMedia(allowed_domains=config.media.allowed_domains),
        cache=ResolvedCache(
            dir=os.path.abspath(user_path(choices.resolve("cache.dir", config.cache.dir, auto_cache_dir)))
        ),
        choices=tuple(choices.made),
        without_effect=() if device.is_cuda else _of_gpus_alone(config),
    )


def _speculative(
    asked: SpeculativeConfig, model: ModelFolder, runtime: RuntimeSection, choices: AutoChoices
) -> SpeculativeSection:
    def choose() -> tuple[str, str]:
        if runtime.num_ranks == 1 and not runtime.skip_compiled and num_prediction_layers(model):
            return "mtp", "the checkpoint has a layer for multi-token prediction"
        return METHOD_WITHOUT_WEIGHTS, "it needs no weights, and knows past answers too"

    method = choices.resolve(METHOD_KEY, asked.method, choose)
    num_tokens = "by_cost"
    if method != "none":
        num_tokens = choices.resolve(
            "speculative.num_speculative_tokens",
            asked.num_speculative_tokens,
            lambda: ("by_cost", "as many as pay, by what steps take and what is accepted"),
        )
    resolved = {"method": method, "num_speculative_tokens": num_tokens}  # the others have no `auto`
    if asked.token_map is not None:
        resolved["token_map"] = os.path.abspath(user_path(asked.token_map))
    return SpeculativeSection(**asked.model_dump() | resolved)


def _lora(asked: LoraConfig, runtime: RuntimeSection, model: ModelFolder) -> LoraSection:
    """The section; its targets stay open where they are `auto`: they show when the model is compiled."""
    if asked.max_adapters and runtime.pipeline_parallel_size > 1:
        raise ConfigError(
            f"lora.max_adapters is {asked.max_adapters} and runtime.pipeline_parallel_size "
            f"{runtime.pipeline_parallel_size}: stages take no adapters. Leave out one of them, or set "
            "runtime.tensor_parallel_size."
        )
    if asked.max_adapters and runtime.skip_compiled:
        raise ConfigError(
            f"lora.max_adapters is {asked.max_adapters}, and runtime.skip_compiled is set: the eager model takes no "
            "adapters. Leave out one of them."
        )
    adapters = {name: os.path.abspath(user_path(path)) for name, path in asked.adapters.items()}
    targets = () if asked.targets == "auto" else tuple(sorted(asked.targets))
    given = {name: getattr(asked, name) for name in ("max_adapters", "max_rank", "dora")}
    section = LoraSection(**given, targets=targets, adapters=adapters)
    # Sounds are for compiled models of one stage alone.
    if runtime.pipeline_parallel_size > 1 or runtime.skip_compiled or (own := adapter_of_sounds(model)) is None:
        return section
    return replace(
        section,
        max_adapters=max(asked.max_adapters, 1),
        max_rank=max(asked.max_rank, own.rank),
        adapters={OF_SOUNDS: str(own.folder)} | adapters,
        of_sounds=OF_SOUNDS,
    )


def _structured_outputs(asked: StructuredOutputsConfig, choices: AutoChoices) -> ResolvedStructuredOutputs:
    cores = len(os.sched_getaffinity(0))
    threads = choices.resolve(
        "structured_outputs.threads", asked.threads, lambda: (min(max(cores // 4, 1), 4), f"of {cores} processors")
    )
    backends = choices.resolve(
        "structured_outputs.backend",
        asked.backend,
        lambda: (STRUCTURE_BACKENDS, "the second takes what the first refuses"),
    )
    return ResolvedStructuredOutputs(backends=backends if isinstance(backends, tuple) else (backends,), threads=threads)


def _auto_dtype(config: EngineConfig, model: ModelFolder, device: DeviceInfo) -> tuple[str, str]:
    if not device.is_cuda:
        if has_amx(device.device):
            return "bfloat16", "the CPU's AMX multiplies it fastest; float32 is exact"
        return "float32", "the CPU has no AMX, by which bfloat16 would be faster"
    dtype = model.checkpoint_dtype()
    if dtype is None:
        return "bfloat16", "the checkpoint names no type"
    if dtype == "float32":
        return "bfloat16", "the checkpoint's float32 is a training type; set model.dtype: float32 to keep it"
    kinds = () if model.scheme is None or config.model.quantization == "dequantize" else model.scheme.kinds
    if dtype == "float16" and "int4" in kinds and device.is_hopper:
        return "bfloat16", "kernels read the checkpoint's four-bit weights beside that; float16 is its scales' type"
    return dtype, "the checkpoint's"


def _runtime(
    config: EngineConfig, dtype: str, backend: BackendName, model: ModelFolder, device: DeviceInfo, choices: AutoChoices
) -> RuntimeSection:
    asked = config.runtime
    if asked.enable_sleep_mode and asked.skip_compiled:
        raise ConfigError(
            "runtime.enable_sleep_mode and runtime.skip_compiled are set: Transformers' own model keeps its memory. "
            "Set one of them alone."
        )
    if asked.kv_events_config.enable_kv_cache_events and not asked.enable_prefix_cache:
        raise ConfigError(
            "runtime.kv_events_config is set, and runtime.enable_prefix_cache is false: there are no blocks to tell "
            "of. Set one of them alone."
        )
    check_tiers(asked)
    kind = "cuda" if device.is_cuda else "cpu"
    choices.resolve("runtime.device", asked.device, lambda: (device.device, device.name))
    any_rows = has_any_rows(config, dtype, backend, model, device)
    requests, tokens = _batch_limits(asked, any_rows, kind, model, choices)
    resolved_values = {
        "device": device.device,
        "attention_backend": backend,
        "page_size": choices.resolve(
            "runtime.page_size", asked.page_size, lambda: (PAGE_SIZE[backend], f"for {backend}")
        ),
        "kv_cache_dtype": resolve_kv_cache_dtype(asked, dtype, choices),
        "max_model_len": _max_model_len(asked, kind, backend, model, choices),
        "max_running_requests": requests,
        "max_num_batched_tokens": tokens,
        "any_rows": any_rows,
        "max_step_ms": resolve_max_step_ms(asked, any_rows, choices),
        "kv_transfer_config": kv_transfer(asked.kv_transfer_config),
        "kv_offloading_write_policy": write_policy(asked),
        "kv_events_config": KVEventsSection(**asked.kv_events_config.model_dump()),
        "cascade_attention": False,  # chosen when the graphs are
    }
    _check_total_tokens(asked.max_total_tokens, resolved_values["max_model_len"])
    return RuntimeSection(**asked.model_dump() | resolved_values)  # the other keys have no `auto`


def _check_total_tokens(total: int | None, of_request: int) -> None:
    if total is not None and total < of_request:
        raise ConfigError(
            f"runtime.max_total_tokens is {total}, which one request of runtime.max_model_len ({of_request}) exceeds. "
            "Raise it, or lower max_model_len"
        )


def _check_sparse_activations(runtime: RuntimeSection, model: ModelFolder) -> None:
    pattern = model.text_config_value("activation_sparsity_pattern")
    if runtime.tensor_parallel_size > 1 and any(pattern if isinstance(pattern, list) else [pattern]):
        raise ConfigError(
            f"runtime.tensor_parallel_size is {runtime.tensor_parallel_size}, and the model's config has an "
            "activation_sparsity_pattern: layers cut off activations by the mean and spread of all, of which ranks "
            "have parts. Set it to 1."
        )


def _batch_limits(
    asked: RuntimeConfig, any_rows: bool, kind: str, model: ModelFolder, choices: AutoChoices
) -> tuple[int, int]:
    """(max_running_requests, max_num_batched_tokens): every running request needs a token of a step's budget."""
    auto_tokens, why = MAX_NUM_BATCHED_TOKENS[kind], f"for {kind}"
    if kind == "cuda" and _rows_of_expert(model, auto_tokens) < _FEW_ROWS_OF_EXPERT:
        auto_tokens, why = TOKENS_OF_SMALL_EXPERTS, f"for {kind}, as each expert gets few of a step's tokens"
    if any_rows:
        auto_tokens, why = DETERMINISTIC_ANY_TOKENS, "deterministic: each token of a prompt is a row"
    elif asked.deterministic:
        auto_tokens, why = deterministic_tokens(kind, model), f"deterministic: every step on {kind} has so many"
    budget = asked.max_num_batched_tokens
    step = auto_tokens if budget == "auto" else budget
    most_requests, why_requests = min(MAX_RUNNING_REQUESTS[kind], step), f"for {kind}"
    if asked.deterministic and not any_rows and 1 < step < 2 * most_requests:
        most_requests, why_requests = step // 2, "deterministic: half of a step, so that prompts get on"
    requests = choices.resolve(
        "runtime.max_running_requests",
        asked.max_running_requests,
        lambda: (most_requests, why_requests),
    )
    tokens = choices.resolve("runtime.max_num_batched_tokens", budget, lambda: (max(auto_tokens, requests), why))
    if requests > tokens:
        raise ConfigError(
            f"runtime.max_running_requests is {requests}, more than runtime.max_num_batched_tokens {tokens}: each "
            f"running request takes a token of every step. Raise the second or lower the first."
        )
    return requests, tokens


def _rows_of_expert(model: ModelFolder, num_tokens: int) -> float:
    """Rows that an expert gets of so many tokens on average; all, of a model without experts."""
    num_experts = model.text_config_value("num_experts", "num_local_experts", "n_routed_experts")
    num_chosen = model.text_config_value("num_experts_per_tok", "num_experts_per_token")
    are_numbers = isinstance(num_experts, int) and isinstance(num_chosen, int) and num_experts > 0
    return num_tokens * num_chosen / num_experts if are_numbers else num_tokens


def _max_model_len(
    asked: RuntimeConfig, kind: str, backend: BackendName, model: ModelFolder, choices: AutoChoices
) -> int:
    limit, full = longest_text(model), full_length(model)
    if full is not None and isinstance(asked.max_model_len, int) and asked.max_model_len > full:
        check_chosen_keys(asked, backend, full, model)
    elif full is not None:
        limit = full if limit is None else min(limit, full)

    def choose() -> tuple[int, str]:
        if limit is not None and limit <= MAX_MODEL_LEN[kind]:
            return limit, "the model's own limit"
        return MAX_MODEL_LEN[kind], f"for {kind}; the model takes {limit or 'any length'}"

    length: int = choices.resolve("runtime.max_model_len", asked.max_model_len, choose)
    if limit is not None and length > limit:
        raise ConfigError(
            f"runtime.max_model_len is {length}, but the model was made for at most {limit} tokens. Set it to "
            f"{limit} or less."
        )
    return length


def longest_text(model: ModelFolder) -> int | None:
    """Tokens that the model was made for, those included that RoPE's type `dynamic` adds; None: config.json says no
    length."""
    limit = model.text_config_value(*_LENGTH_KEYS)
    if not isinstance(limit, int) or limit < 1 or model.text_config_value(_BUCKETS_KEY) is not None:
        return None
    rope = model.text_config_value("rope_parameters", "rope_scaling")
    if isinstance(rope, dict) and "dynamic" in (rope.get("rope_type"), rope.get("type")):
        factor = rope.get("factor")
        if isinstance(factor, int | float) and 1 < factor < math.inf:
            limit = int(limit * factor)
    return limit


def _of_gpus_alone(config: EngineConfig) -> tuple[str, ...]:
    """Keys without an effect on a CPU that differ from their defaults."""
    sections = {name: getattr(config, name) for name in _KEYS_OF_GPUS}
    defaults = {name: type(section).model_fields for name, section in sections.items()}
    return tuple(
        f"{name}.{key}"
        for name, section in sections.items()
        for key in _KEYS_OF_GPUS[name]
        if getattr(section, key) not in (defaults[name][key].default, _SWITCHES_OF_CPUS)
    )
