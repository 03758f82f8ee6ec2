"""Resolves `runtime.device` on this machine: which device it is, and whether its attention library is there."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass

from mllm_compile.config.schema_runtime import MAX_RANKS
from mllm_compile.errors import ConfigError, DeviceError
from mllm_compile.process.cpp_compiler import compiler_command
from mllm_compile.runtime.config_sections import RuntimeSection
from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS

# FlashInfer's and Triton's bfloat16 kernels need what an A100 or an RTX 30 has.
LEAST_CAPABILITY = (8, 0)
_ELSE = "Set runtime.device: cpu, or cuda:N of another GPU."


@dataclass(frozen=True)
class DeviceInfo:
    """The device that will serve.

    Attributes:
        device: `cpu`, or `cuda:N` with the index filled in.
        name: for people: `NVIDIA H200`, `x86_64`.
        has_flashinfer: the package is installed (found, not imported: importing it may initialise CUDA).
        is_hopper: the CUDA kernels of runtime/ops/stream_linear/ and runtime/attention/hopper/ are for it.
    """

    device: str
    name: str
    has_flashinfer: bool = False
    is_hopper: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")


def detect_device(asked: str) -> DeviceInfo:
    """Looks for the device of `runtime.device`: auto | cpu | cuda | cuda:N.

    Raises:
        DeviceError: a GPU was asked for and torch sees none, or none of that number; or the kernels cannot run on it.
    """
    if asked == "cpu":
        return _cpu()
    import torch

    if not torch.cuda.is_available():
        if asked == "auto":
            return _cpu()
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "no NVIDIA driver or GPU answers"
        raise DeviceError(
            f"runtime.device is {asked!r}, but torch {torch.__version__} sees no GPU ({reason}). Set runtime.device: "
            f"cpu, or install a CUDA build of torch on a machine with an NVIDIA GPU."
        )
    count = torch.cuda.device_count()
    index = int(asked.partition(":")[2] or 0)
    if index >= count:
        raise DeviceError(f"runtime.device is {asked!r}, but there are {count} GPUs: cuda:0 to cuda:{count - 1}.")
    device, name = f"cuda:{index}", torch.cuda.get_device_name(index)
    if torch.version.hip is not None:
        raise DeviceError(
            f"{device} is {name}, and this torch is built for ROCm; the kernels are for NVIDIA GPUs. {_ELSE}"
        )
    facts = torch.cuda.get_device_properties(index)
    if (facts.major, facts.minor) < LEAST_CAPABILITY:
        raise DeviceError(
            f"{device} is {name} of compute capability {facts.major}.{facts.minor}; the kernels need "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer (A100, RTX 30, L40S, H100, B200, …). {_ELSE}"
        )
    return DeviceInfo(device, name, importlib.util.find_spec("flashinfer") is not None, is_hopper(device))


# Features that stages of a pipeline do not have.
_NOT_STAGED = {
    "enable_dbo": "a step's halves would be handed on apart",
    "expert_stats": "each stage counts its own layers",
    "routed_experts": "each stage sees its own layers",
}
# Features that experts spread over ranks do not have.
_NOT_SPREAD = {
    "deterministic": "steps have as many tokens as the rank that has most",
    "routed_experts": "a rank sees the tokens of all, and their slots are each rank's own",
}


def check_ranks(runtime: RuntimeSection) -> None:
    """Checks that there is a device for each rank: on GPUs one and those behind it.

    Raises:
        DeviceError: there are fewer GPUs.
        ConfigError: the model would run without the parts that are cut over ranks, or in two ways that exclude each
            other; or a launcher of ranks is named for one rank.
    """
    num_ranks = runtime.num_ranks
    _check_nodes(runtime)
    if runtime.enable_dbo:
        _check_overlap(runtime)
    if num_ranks == 1:
        if runtime.distributed_executor_backend == "ray":
            raise ConfigError(
                "runtime.distributed_executor_backend is ray, which starts further ranks, and there is one rank, this "
                "process. Set runtime.tensor_parallel_size or expert_parallel_size, or leave the backend at mp."
            )
        return
    if runtime.tensor_parallel_size > 1 and runtime.expert_parallel_size > 1:
        raise ConfigError(
            f"runtime.tensor_parallel_size is {runtime.tensor_parallel_size} and runtime.expert_parallel_size "
            f"{runtime.expert_parallel_size}: a model is cut, or its experts are spread. Set one of them alone."
        )
    keys = ("tensor_parallel_size", "expert_parallel_size", "pipeline_parallel_size")
    key = next(name for name in keys if getattr(runtime, name) > 1)
    if runtime.pipeline_parallel_size > 1:
        _check_stages(runtime)
    if runtime.skip_compiled:
        raise ConfigError(
            f"runtime.skip_compiled runs Transformers' own model, which is not cut, and runtime.{key} is "
            f"{getattr(runtime, key)}. "
            "Set one of them alone."
        )
    for other, why in _NOT_SPREAD.items():
        if runtime.expert_parallel_size > 1 and getattr(runtime, other):
            raise ConfigError(
                f"runtime.expert_parallel_size is {num_ranks} and runtime.{other} is set, but {why}. Set one of them "
                "alone."
            )
    if runtime.device.startswith("cuda"):
        sizes = ", ".join(f"runtime.{name}: {value}" for name in keys if (value := getattr(runtime, name)) > 1)
        on_this_host = 1 if runtime.distributed_executor_backend == "ray" else num_ranks // runtime.nnodes
        check_gpus(runtime.device, on_this_host, sizes)  # Ray says whether its nodes have the others


def _check_nodes(runtime: RuntimeSection) -> None:
    given = f"runtime.nnodes is {runtime.nnodes}"
    if (of_host := runtime.num_ranks // runtime.nnodes) > MAX_RANKS:
        raise ConfigError(
            f"runtime.tensor_parallel_size is {runtime.tensor_parallel_size} and runtime.pipeline_parallel_size "
            f"{runtime.pipeline_parallel_size}: {of_host} ranks of a host; expected at most {MAX_RANKS}. Set less."
        )
    if runtime.node_rank >= runtime.nnodes:
        raise ConfigError(f"{given} and runtime.node_rank {runtime.node_rank}; expected 0 to {runtime.nnodes - 1}.")
    if runtime.pipeline_parallel_size % runtime.nnodes:
        raise ConfigError(
            f"{given} and runtime.pipeline_parallel_size {runtime.pipeline_parallel_size}; expected a multiple of it, "
            "as each node has whole stages."
        )
    if runtime.nnodes > 1 and runtime.distributed_executor_backend != "mp":
        raise ConfigError(
            f"{given}, and runtime.distributed_executor_backend is ray: nodes start their own ranks. Set mp."
        )


def _check_stages(runtime: RuntimeSection) -> None:
    given = f"runtime.pipeline_parallel_size is {runtime.pipeline_parallel_size}"
    if runtime.expert_parallel_size > 1:
        raise ConfigError(
            f"{given} and runtime.expert_parallel_size {runtime.expert_parallel_size}: ranks with requests of their "
            "own are no stages. Set one of them alone, or runtime.tensor_parallel_size beside stages."
        )
    for name, why in _NOT_STAGED.items():
        if getattr(runtime, name):
            raise ConfigError(f"{given} and runtime.{name} is set, but {why}. Set one of them alone.")


def check_gpus(device: str, num_ranks: int, sizes: str = "") -> None:
    """Checks that there is a GPU for each rank, `device` and those behind it.

    Args:
        sizes: keys that the number of ranks comes from, with their values.

    Raises:
        DeviceError: there are fewer.
    """
    import torch

    first, count = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if first + num_ranks > count:
        raise DeviceError(
            f"{sizes}: the {num_ranks} ranks of this host take as many GPUs from {device} on; torch sees {count}, "
            f"cuda:0 to cuda:{count - 1}. Set a smaller one, or another device."
        )


def _check_overlap(runtime: RuntimeSection) -> None:
    why = None
    if runtime.tensor_parallel_size == 1:
        why = "runtime.tensor_parallel_size is 1: there are no sums over ranks to hide"
    elif runtime.deterministic:
        why = "with runtime.deterministic no number may go by where a step is cut"
    elif runtime.dbo_prefill_token_threshold > runtime.max_num_batched_tokens:
        why = (
            f"no step has the {runtime.dbo_prefill_token_threshold} tokens of runtime.dbo_prefill_token_threshold, as "
            f"runtime.max_num_batched_tokens is {runtime.max_num_batched_tokens}"
        )
    if why is not None:
        raise ConfigError(f"runtime.enable_dbo is true, but {why}. Set runtime.enable_dbo: false.")


def is_hopper(device: str) -> bool:
    """True for an H100 SXM, H200 or alike: of compute capability 9.0, with as many multiprocessors.

    Work divided for 132 multiprocessors would take two rounds on fewer, the second half empty.
    """
    import torch

    facts = torch.cuda.get_device_properties(torch.device(device))
    return (facts.major, facts.minor) == (9, 0) and facts.multi_processor_count >= MULTIPROCESSORS


def _cpu() -> DeviceInfo:
    return DeviceInfo("cpu", platform.machine())


def has_libraries(device: str, backend: str) -> bool:
    """True if programs on `device` call C++ of our own (runtime/cpu/): on a CPU, where there is a compiler, which
    packages need anyway.

    Args:
        backend: compile.backend.
    """
    return device == "cpu" and (backend != "eager" or compiler_command() is not None)


def has_panels(device: str) -> bool:
    """True if linears on `device` compute by our C++ (runtime/ops/panels): on a CPU whose vectors it is written for."""
    import torch

    return device == "cpu" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def has_amx(device: str) -> bool:
    """True if `device` is a CPU with AMX, which multiplies bfloat16 many times as fast as float32."""
    import torch

    return device == "cpu" and torch.cpu._is_amx_tile_supported()
