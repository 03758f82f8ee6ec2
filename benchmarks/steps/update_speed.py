"""Milliseconds of an update of a served model's weights: until all is taken, and of the pause of its steps.

    python -m benchmarks.steps.update_speed CONFIG [--rounds 5] [--requests 8]

Tensors are on the engine's device, as a trainer beside it has them, under the parameters' names. Staged, direct, and
single values (1 % of each matrix) take turns in each round, with requests that decode meanwhile. Prints medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.engine.assemble import assemble
from mllm_compile.errors import WeightUpdateError
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.updates.live import LiveWeights


def tensors_of(live: LiveWeights, *, on_host: bool = False) -> dict[str, torch.Tensor]:
    """Random tensors of every parameter, in the model's type; on the engine's device unless `on_host`."""
    device = next(iter(live.tensors.values())).device
    dtype = next(spec.dtype for spec in live.specs if spec.dtype.is_floating_point and spec.dtype.itemsize > 1)
    shapes = {part.tensor: part.shape for spec in live.places.parameters for part in spec.parts}
    place = torch.device("cpu") if on_host else device
    return {name: (torch.randn(shape, dtype=dtype, device=device) * 0.02).to(place) for name, shape in shapes.items()}


def staged(engine: Engine, tensors: dict[str, torch.Tensor]) -> float:
    return engine.update_weights(tensors.items()).pause_s


def direct(engine: Engine, tensors: dict[str, torch.Tensor]) -> float:
    return engine.update_weights(tensors.items(), direct=True).pause_s


def single_values(engine: Engine, tensors: dict[str, torch.Tensor]) -> float:
    engine.weights.start(partial=True)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            places = torch.arange(0, tensor.numel(), 100, device=tensor.device, dtype=torch.int64)
            engine.weights.receive_delta(name, places, tensor.view(-1)[places])
    return engine.weights.finish().pause_s


WAYS: dict[str, Callable[[Engine, dict[str, torch.Tensor]], float]] = {
    "staged": staged,
    "direct": direct,
    "1 % of values": single_values,
}


def main() -> None:
    """Prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--requests", type=positive, default=8)
    arguments = parser.parse_args()
    parts = assemble(EngineConfig.from_yaml(arguments.config), Timeline())
    live = parts.live
    if isinstance(live, str):
        raise WeightUpdateError(live)
    is_quantised = any(part.kept is not None for spec in live.specs for part in spec.parts)
    ways = {name: way for name, way in WAYS.items() if way is not single_values or not is_quantised}
    tensors = tensors_of(live)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with Engine.from_parts(parts) as engine:
        for number in range(arguments.rounds + 1):
            for name, way in ways.items():
                running = [engine.stream([7, index + 1], greedy(4096)) for index in range(arguments.requests)]
                for stream in running:
                    next(stream)
                began = time.perf_counter()
                pause_s = way(engine, tensors)
                if number:  # the first round warms up
                    found[name].append((time.perf_counter() - began, pause_s))
                engine.pause("abort")
                engine.resume()
    total = sum(tensor.nbytes for tensor in tensors.values())
    machine = machine_line() if torch.cuda.is_available() else "a CPU"
    print(f"{machine}; {total / 1e9:.2f} GB in {len(tensors)} tensors, {arguments.requests} requests")
    for name, times in found.items():
        whole, pause = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        print(f"{name:14} {whole:9.1f} ms in all, {pause:9.1f} ms of pause")


if __name__ == "__main__":
    with told_in_one_line():
        main()
