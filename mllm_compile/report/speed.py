"""The speed of a runtime's decode step on one device: measured if a benchmark was run, else from its bytes.

The two are never mixed: a `DecodeStep` has measured times for all of its parts, or for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.bench.limits.step_parts import StepPart, WeightSize, limit_s, step_parts
from mllm_compile.bench.measure.results import Ceilings
from mllm_compile.bench.measure.workloads import StepWork
from mllm_compile.store.measurements import DeviceKey, device_key, read_all_measured, read_measured, write_measured

if TYPE_CHECKING:
    from mllm_compile.config.resolved import ResolvedConfig
    from mllm_compile.store.artifact import Artifact

_MOST_LOADS = 6


@dataclass(frozen=True)
class Device:
    """A device, and the measurements on it beside this runtime (store/measurements.py).

    Attributes:
        name: for people: a CPU's with the threads that were measured with.
        ceilings: None where they were never measured.
    """

    key: DeviceKey
    name: str
    ceilings: Ceilings | None
    values: Mapping[str, Any]


@dataclass(frozen=True)
class DecodeStep:
    """A decode step of `batch` requests with `context` tokens each.

    Attributes:
        parts: its parts in the program's order.
        part_s: index in program.steps → measured seconds of its kernels; None: nothing was measured.
        other_s: seconds of the measured step's kernels of no part: inputs made ready, tokens chosen.
        wall_s: the measured step from outside, host work included.
        date: when it was measured.
    """

    batch: int
    context: int
    parts: Sequence[StepPart]
    part_s: Mapping[int, float] | None = None
    other_s: float = 0.0
    wall_s: float = 0.0
    date: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        return sum(part.weight_bytes for part in self.parts)

    @property
    def outside_s(self) -> float:
        """Seconds of the measured step without a running kernel: the host works."""
        kernels_s = 0.0 if self.part_s is None else sum(self.part_s.values())
        return max(0.0, self.wall_s - kernels_s - self.other_s)


@dataclass(frozen=True)
class Load:
    """A decode step of some batch.

    Attributes:
        limit_s: the least seconds that the ceilings allow; None without ceilings.
        bound: the largest share of them: `weights`, `KV cache` or `arithmetic`.
        measured_s: a token's time as `bench latency` found it; None where it was not run.
    """

    batch: int
    context: int
    num_bytes: int
    limit_s: float | None
    bound: str
    measured_s: float | None


def page_device(artifact: Artifact, config: ResolvedConfig) -> Device | None:
    """The config's device where this machine has it, else one that the runtime was measured on; None: neither."""
    key = _key_here(config.runtime.device)
    if key is not None:
        return _device(key, read_measured(artifact.measured_folder, key))
    measured = read_all_measured(artifact.measured_folder)
    return _device(*measured[0]) if measured else None


def ensure_ceilings(artifact: Artifact, config: ResolvedConfig) -> None:
    """Measures this machine's device once a runtime (a second), unless a benchmark has; a device that is not here or
    has no room is left alone."""
    from mllm_compile.bench.limits.ceilings import measure_ceilings
    from mllm_compile.bench.measure.environment import device_name

    key = _key_here(config.runtime.device)
    if key is None or "ceilings" in (values := read_measured(artifact.measured_folder, key)):
        return
    device = torch.device(config.runtime.device)
    try:
        ceilings = measure_ceilings(device, getattr(torch, config.model.dtype))
    except torch.OutOfMemoryError:
        return
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    found = {**asdict(ceilings), "device": device_name(device), "date": date}
    write_measured(artifact.measured_folder, key, values | {"ceilings": found})


def decode_step(artifact: Artifact, config: ResolvedConfig, device: Device | None) -> DecodeStep:
    """The smallest step that `bench roofline` measured on the device, or one of one request, as far as bytes tell."""
    for found in sorted(device.values.get("decode steps", ()) if device else (), key=lambda found: found["batch"]):
        parts = decode_parts(artifact, config, found["batch"], found["context"])
        return DecodeStep(
            batch=found["batch"],
            context=found["context"],
            parts=parts,
            part_s={index: us / 1e6 for index, us in found["parts"]},
            other_s=found["other_us"] / 1e6,
            wall_s=found["wall_us"] / 1e6,
            date=found["date"],
        )
    context = _load_context(config, device)
    return DecodeStep(1, context, decode_parts(artifact, config, 1, context))


def loads(artifact: Artifact, config: ResolvedConfig, device: Device | None) -> list[Load]:
    """Steps of one request and more, up to all that may run; those that `bench latency` measured among them."""
    latency = device.values.get("latency") if device else None
    measured = {} if latency is None else {batch: ms / 1e3 for batch, ms in latency["tpot_ms"]}
    context = _load_context(config, device)
    most = config.runtime.max_running_requests
    powers = [4**power for power in range(_MOST_LOADS) if 4**power < most]
    batches = sorted({*powers, most, *measured})
    return [_load(artifact, config, device, batch, context, measured.get(batch)) for batch in batches]


def _load_context(config: ResolvedConfig, device: Device | None) -> int:
    """Tokens of each request: of the measured latency work in the middle of its answers, or of its default work."""
    latency = device.values.get("latency") if device else None
    context = StepWork.context if latency is None else latency["input_len"] + latency["output_len"] // 2
    return int(min(context, config.runtime.max_model_len))


def weight_sizes(artifact: Artifact) -> dict[str, WeightSize]:
    return {spec.name: WeightSize(spec.shape, spec.dtype) for spec in artifact.weights}


def _load(
    artifact: Artifact,
    config: ResolvedConfig,
    device: Device | None,
    batch: int,
    context: int,
    measured_s: float | None,
) -> Load:
    parts = decode_parts(artifact, config, batch, context)
    weight_bytes, kv_bytes = sum(part.weight_bytes for part in parts), sum(part.kv_bytes for part in parts)
    bound = "weights" if weight_bytes >= kv_bytes else "KV cache"
    limit = None
    if device is not None and device.ceilings is not None:
        ceilings = device.ceilings
        limit = limit_s(parts, ceilings)
        flops, fp8_flops = sum(part.flops for part in parts), sum(part.fp8_flops for part in parts)
        is_arithmetic = ceilings.products_s(flops, fp8_flops) > weight_bytes / ceilings.read_bytes_s
        bound = "arithmetic" if is_arithmetic and kv_bytes / ceilings.read_bytes_s < limit / 2 else bound
    return Load(batch, context, weight_bytes + kv_bytes, limit, bound, measured_s)


def decode_parts(artifact: Artifact, config: ResolvedConfig, batch: int, context: int) -> list[StepPart]:
    kv_cache_dtype = getattr(torch, config.runtime.kv_cache_dtype)
    states = config.runtime.state_dtype
    return step_parts(artifact.program, weight_sizes(artifact), kv_cache_dtype, batch, context, states)


def _device(key: DeviceKey, values: Mapping[str, Any]) -> Device:
    found = values.get("ceilings")
    ceilings = None
    if found is not None:
        rates = {name: found[name] for name in ("read_bytes_s", "flops_s")}
        ceilings = Ceilings(**rates, fp8_flops_s=found.get("fp8_flops_s"))
    return Device(key, key.name if found is None else found["device"], ceilings, values)


def _key_here(device: str) -> DeviceKey | None:
    if device.startswith("cuda") and (torch.device(device).index or 0) >= torch.cuda.device_count():
        return None
    return device_key(device)
