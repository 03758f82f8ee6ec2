"""A device that engines of several models share: what an engine needs before its start, and holds after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.device.memory import CPU_KV_SHARE, give_back_unused, memory_bytes
from mllm_compile.runtime.memory_pool import GDNPool, KVPool
from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.store.opened import CompiledRuntime

if TYPE_CHECKING:
    from mllm_compile.engine.engine import Engine


_PROCESS_BYTES = 2 << 30


@dataclass(frozen=True)
class DeviceNeeds:
    """The needs of a model, in bytes and tokens.

    Attributes:
        free_bytes: of the device now.
        usable_bytes: of the device, for all engines together.
        kv_bytes: for the KV caches of all engines together.
        process_bytes: graphs, libraries and a step, until a ready engine tells its own; 0 on a CPU.
        fixed_bytes: weights, states and adapters.
        token_bytes: of a token in the KV cache.
        least_tokens: of one request, without which the model cannot be served.
        most_tokens: that all its requests can use.
    """

    device: str
    free_bytes: int
    usable_bytes: int
    kv_bytes: int
    process_bytes: int
    fixed_bytes: int
    token_bytes: int
    least_tokens: int
    most_tokens: int


def device_needs(source: EngineConfig, reporter: Reporter) -> DeviceNeeds:
    """The needs of a model, which is compiled first where no cached runtime fits.

    Raises:
        MllmError: it cannot be served, or is spread over several devices.
    """
    compiled = load_or_compile(source, reporter)
    runtime = compiled.config.runtime
    if compiled.config.model.pools:
        raise ConfigError("the model pools: several models of a server are those that generate. Serve it by itself")
    if runtime.num_ranks > 1:
        raise ConfigError(
            f"a server of many models has one device for each, and this one asks for {runtime.num_ranks} ranks. Leave "
            "out runtime.tensor_parallel_size, pipeline_parallel_size and expert_parallel_size, or serve it alone"
        )
    device = torch.device(runtime.device)
    give_back_unused(device)  # what a compile has left
    free, total = memory_bytes(device)
    usable = free if device.type == "cpu" else int(total * runtime.mem_fraction_static) - (total - free)
    most = runtime.max_running_requests * runtime.max_model_len
    return DeviceNeeds(
        device=runtime.device,
        free_bytes=free,
        usable_bytes=usable,
        kv_bytes=int(usable * CPU_KV_SHARE) if device.type == "cpu" else usable,
        process_bytes=0 if device.type == "cpu" else _PROCESS_BYTES,
        fixed_bytes=_fixed_bytes(compiled),
        token_bytes=_all_token_bytes(compiled),
        least_tokens=runtime.max_model_len,
        most_tokens=most if runtime.max_total_tokens is None else min(most, runtime.max_total_tokens),
    )


def begin_share(device: str) -> int:
    """Bytes of a device that nobody holds, ahead of an engine's start; `held_bytes` then tells what it has taken."""
    one = torch.device(device)
    if one.type == "cuda":
        torch.cuda.reset_peak_memory_stats(one)
    return memory_bytes(one)[0]


def token_bytes(config: ResolvedConfig, layers: Sequence[LayerSpec]) -> int:
    """Bytes that a token takes in the KV cache."""
    return KVPool.bytes_per_page(
        1, [layer.cache_shape for layer in layers], getattr(torch, config.runtime.kv_cache_dtype)
    )


def state_bytes(config: ResolvedConfig, layers: Sequence[StateLayer]) -> int:
    """Bytes that the states of a request take."""
    sums = config.runtime.state_dtype
    return GDNPool.bytes_per_row([(layer.state_shape, getattr(torch, layer.state_dtype(sums))) for layer in layers])


def num_states(config: ResolvedConfig) -> int:
    """Rows of states: of requests, of padding, and of cached prefixes."""
    runtime = config.runtime
    return runtime.max_running_requests * (1 + runtime.enable_prefix_cache) + 1


def held_bytes(engine: Engine, free_before: int) -> tuple[int, int]:
    """Bytes that a ready engine holds for good, and those that it gives back while it sleeps. (0, 0) on a CPU.

    Args:
        free_before: of its device, ahead of its start; other processes held the same then as now.
    """
    device = torch.device("cpu" if engine.config is None else engine.config.runtime.device)
    if device.type != "cuda":
        return 0, engine.sleep_bytes
    step = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)  # of the largest, taken anew
    used = free_before - memory_bytes(device)[0]
    return max(0, used - engine.sleep_bytes), engine.sleep_bytes + step


def _fixed_bytes(compiled: CompiledRuntime) -> int:
    program, config = compiled.artifact.program, compiled.config
    num_bytes = sum(spec.num_bytes for spec in compiled.artifact.weights)
    num_bytes += num_states(config) * state_bytes(config, program.state_layers) if program.state_layers else 0
    num_bytes += 0 if program.lora is None else program.lora.layout.num_bytes
    return num_bytes + (0 if compiled.drafter is None else _fixed_bytes(compiled.drafter))


def _all_token_bytes(compiled: CompiledRuntime) -> int:
    own = token_bytes(compiled.config, compiled.artifact.program.layers)
    return own + (0 if compiled.drafter is None else _all_token_bytes(compiled.drafter))
