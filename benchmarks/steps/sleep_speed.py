"""Milliseconds of a served model's sleep and wake in place, and the memory that other processes then have.

    python -m benchmarks.steps.sleep_speed CONFIG [--rounds 5]

Each round sleeps at level 1 with weights that the host has no copy of yet, at level 1 with a copy, and at level 2.
Tokens behind every wake are compared with those before. Prints the first sleep, then medians.
"""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path

import torch

from benchmarks.rounds import Rounds
from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from benchmarks.steps.update_speed import Given
from benchmarks.update_sender import random_tensors
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.config.sources import with_runtime
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.errors import DeviceError, WeightUpdateError
from mllm_compile.process.timeline import Timeline

_PROMPTS = [[7, index + 1] for index in range(8)]


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def views_of_one(given: Given) -> dict[str, torch.Tensor]:
    """Weights that are all views of the same random numbers, as the KV cache has nearly all memory."""
    most = max(map(prod, given.shapes.values()))
    numbers = random_tensors({"all": (most,)}, given.dtype, given.device)["all"]
    return {name: numbers[: prod(shape)].view(shape) for name, shape in given.shapes.items()}


class Cycles:
    """Sleeps and wakes of one engine.

    Args:
        tensors: weights, which the engine serves.
    """

    def __init__(self, engine: Engine, tensors: dict[str, torch.Tensor]) -> None:
        self._engine, self._tensors = engine, tensors
        self.times = Rounds()
        self.given_back = 0
        engine.update_weights(tensors.items(), direct=True)
        self._tokens = self._answers()

    def run(self) -> None:
        """One round."""
        name, tensor = next(iter(self._tensors.items()))
        self._engine.update_weights([(name, tensor)], partial=True)
        for what in ("sleep 1, with a copy to the host", "sleep 1, which the host has a copy of"):
            free = _free_bytes()
            self.times.timed(what, self._engine.sleep)
            self.given_back = _free_bytes() - free
            self.times.timed("wake 1", self._engine.wake_up)
            self._check()
        self.times.timed("sleep 2", lambda: self._engine.sleep(2))
        self.times.timed("wake weights", lambda: self._engine.wake_up(["weights"]))
        self.times.timed("update", lambda: self._engine.update_weights(self._tensors.items(), direct=True))
        self.times.timed("wake kv_cache", lambda: self._engine.wake_up(["kv_cache"]))
        self._check()

    def _answers(self) -> list[list[int]]:
        return [output.token_ids for output in self._engine.generate(_PROMPTS, greedy(16))]

    def _check(self) -> None:
        if self._answers() != self._tokens:
            raise DeviceError("tokens behind a wake are others than before")


def main() -> None:
    """Prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=positive, default=5)
    arguments = parser.parse_args()
    config = with_runtime(EngineConfig.from_yaml(arguments.config), {"enable_sleep_mode": True})
    print(machine_line() if torch.cuda.is_available() else "a CPU")
    parts = assemble(config, Timeline())
    live = parts.live
    if isinstance(live, str):
        raise WeightUpdateError(live)
    tensors = views_of_one(Given(live, ExitStack()))
    with Engine.from_parts(parts) as engine:
        cycles = Cycles(engine, tensors)
        for _ in range(arguments.rounds + 1):
            cycles.run()
    print(f"{cycles.given_back / 1e9:.1f} GB are given back at level 1")
    cycles.times.show()


if __name__ == "__main__":
    with told_in_one_line():
        main()
