"""Chooses what attends: the backend, the type of its KV cache, and kernels beside it that the compiler writes."""

from __future__ import annotations

from mllm_compile.config.resolution.device import DeviceInfo
from mllm_compile.config.resolved import AutoChoices
from mllm_compile.config.schema import CompileConfig
from mllm_compile.config.schema_runtime import RuntimeConfig
from mllm_compile.errors import ConfigError, DeviceError
from mllm_compile.runtime.config_sections import BackendName, CudaGraphSection, KVDtypeName, RuntimeSection
from mllm_compile.runtime.pooling.facts import ModelTask


def resolve_attention_backend(
    asked: RuntimeConfig, dtype: str, device: DeviceInfo, task: ModelTask, choices: AutoChoices
) -> BackendName:
    """The library that attends.

    Raises:
        ConfigError: it does not serve this dtype or device.
        DeviceError: it is not installed.
    """

    def choose() -> tuple[str, str]:
        if task != "generate":
            return "torch", "a model that pools has no KV cache"
        if not device.is_cuda:
            return "torch", "a CPU"
        if dtype == "float32":
            return "torch", "FlashInfer has no float32 kernels"
        return "flashinfer", "a GPU"

    backend: BackendName = choices.resolve("runtime.attention_backend", asked.attention_backend, choose)
    if backend == "flashinfer":
        _require_flashinfer(dtype, device)
    return backend


def _require_flashinfer(dtype: str, device: DeviceInfo) -> None:
    if not device.is_cuda:
        raise ConfigError(
            "runtime.attention_backend is flashinfer, but the device is a CPU. Set runtime.attention_backend: torch."
        )
    if dtype == "float32":
        raise ConfigError(
            "runtime.attention_backend is flashinfer, which has no float32 kernels. Set model.dtype: bfloat16, or "
            "runtime.attention_backend: torch."
        )
    if not device.has_flashinfer:
        raise DeviceError(
            "FlashInfer is not installed, which serves attention on a GPU. Install the extra: "
            "pip install 'mllm-compile[cuda]'; or set runtime.attention_backend: torch (much slower)."
        )


def resolve_kv_cache_dtype(asked: RuntimeConfig, dtype: str, choices: AutoChoices) -> KVDtypeName:
    """The type of keys and values in their pages.

    Raises:
        ConfigError: it is another one in 16 or 32 bits than the model's.
    """
    if asked.kv_cache_dtype == "fp8_e4m3":
        return "float8_e4m3fn"
    kv_dtype: KVDtypeName = choices.resolve(
        "runtime.kv_cache_dtype", asked.kv_cache_dtype, lambda: (dtype, "the model's")
    )
    if kv_dtype != dtype:
        raise ConfigError(
            f"runtime.kv_cache_dtype is {kv_dtype}, the model's dtype {dtype}; a KV cache has the model's own type or "
            "fp8_e4m3. Set runtime.kv_cache_dtype: auto."
        )
    return kv_dtype


def has_split_decode(asked: CompileConfig, runtime: RuntimeSection, dtype: str, device: DeviceInfo) -> bool:
    """True if kernels compiled with the model decode, in layers that they serve: beside FlashInfer's, over a KV cache
    of the model's dtype, or on Hopper over any beside bfloat16."""
    reads_cache = runtime.kv_cache_dtype == dtype or (device.is_hopper and dtype == "bfloat16")
    is_served = runtime.attention_backend == "flashinfer" and asked.backend != "eager" and reads_cache
    return is_served and runtime.takes("split_decode")


def has_hopper_decode(runtime: RuntimeSection, dtype: str, device: DeviceInfo) -> bool:
    """True if runtime/attention/hopper/ may compute decodes: how it divides a request depends on the others."""
    is_served = device.is_hopper and dtype == "bfloat16" and not runtime.deterministic
    return is_served and runtime.takes("hopper_decode")


def resolve_cascade_attention(
    asked: RuntimeConfig,
    runtime: RuntimeSection,
    split_decode: bool,
    graphs: CudaGraphSection,
    dtype: str,
    choices: AutoChoices,
) -> bool:
    """True if decodes that begin with the same pages may read these once; each step then is chosen by cost.

    Attention in plain torch needs no kernels for it.
    """
    refusal, has_kernels = None, runtime.attention_backend == "flashinfer"
    if asked.deterministic:
        refusal = "with runtime.deterministic nothing may depend on the rest of a batch"
    elif not asked.enable_prefix_cache:
        refusal = "without runtime.enable_prefix_cache no requests have the same pages"
    elif asked.expert_parallel_size > 1:
        refusal = "captured decodes of several ranks with requests of their own share no prefix"
    elif asked.pipeline_parallel_size > 1:
        refusal = "a step of stages (runtime.pipeline_parallel_size) is not captured whole"
    elif runtime.max_running_requests == 1:
        refusal = "with runtime.max_running_requests 1 no two requests decode together"
    elif has_kernels and not split_decode:
        refusal = "its kernels are compiled beside our decode kernels (split_decode), which do not serve here"
    elif has_kernels and runtime.kv_cache_dtype != dtype:
        refusal = f"kernels for it read no KV cache of {runtime.kv_cache_dtype}"
    if asked.cascade_attention is True and refusal is not None:
        raise ConfigError(f"runtime.cascade_attention is true, but {refusal}. Set it to auto or false.")

    def choose() -> tuple[bool, str]:
        obstacle = refusal
        if not graphs.sample_in_graph:
            obstacle = obstacle or "decodes are not captured with the choice of their tokens"
        elif runtime.tensor_parallel_size > 1:
            obstacle = obstacle or "it was not tried on several GPUs"
        return (False, obstacle) if obstacle else (True, "in steps of which enough is shared")

    is_on: bool = choices.resolve("runtime.cascade_attention", asked.cascade_attention, choose)
    return is_on
