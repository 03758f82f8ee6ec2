"""Milliseconds of an update of a served model's weights: until all is taken, and of the pause of its steps.

    python -m benchmarks.steps.update_speed CONFIG [--rounds 5] [--requests 8] [--ways staged,direct]

Tensors are on the engine's device, as a trainer beside it has them, under the parameters' names: of this process, or of
another one that shares them (handles), in a folder, or sent by a second GPU (nccl). Ways take turns in each round, with
requests that decode meanwhile. Single values are 1 % of each matrix. Prints medians, and the memory that is held behind
the first round and behind the last.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.rounds import Rounds
from benchmarks.script import greedy, names_of, need_gpu, parser_of, positive, told_in_one_line
from benchmarks.update_sender import GROUP, random_tensors
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.errors import WeightUpdateError
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.device.memory import memory_bytes
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.transfer.transfers import Transfers

_FILE_BYTES = 4 << 30
_OF_ENGINE = 0.6  # of the GPU's memory: the rest is for the tensors that are sent, and for staging


class Given:
    """The weights that updates bring, made when a way first asks for them: of every parameter, in the model's type.

    Args:
        stack: ends what makes them.
    """

    def __init__(self, live: LiveWeights, stack: ExitStack) -> None:
        self._stack = stack
        self._group: tuple[subprocess.Popen[str], Transfers] | None = None
        self.device = next(iter(live.tensors.values())).device
        self.dtype = next(spec.dtype for spec in live.specs if spec.dtype.is_floating_point and spec.dtype.itemsize > 1)
        self.shapes = {part.tensor: part.shape for spec in live.places.parameters for part in spec.parts}

    @property
    def num_bytes(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values()) * self.dtype.itemsize

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return random_tensors(self.shapes, self.dtype, self.device)

    @property
    def on_host(self) -> dict[str, torch.Tensor]:
        return random_tensors(self.shapes, self.dtype, self.device, on_host=True)

    @cached_property
    def handles(self) -> dict[str, Any]:
        """The object for /update_weights, of another process."""
        process = self._sender(self.device, None)
        assert process.stdout is not None, "it is a pipe"
        info: dict[str, Any] = json.loads(process.stdout.readline())
        return info

    def _sender(self, device: torch.device, port: int | None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.update_sender"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._stack.callback(process.communicate)  # it ends with its input
        _tell(process, json.dumps([self.shapes, str(self.dtype).removeprefix("torch."), str(device), port]))
        return process

    def sent(self, engine: Engine) -> Transfers:
        """A group whose other rank, of the next GPU, begins to send all tensors."""
        if self._group is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            process = self._sender(torch.device("cuda", (self.device.index or 0) + 1), port)
            transfers = Transfers(engine.weights)
            transfers.join_named(GROUP, "127.0.0.1", port, 1, 2, "nccl")
            self._group = process, transfers
        process, transfers = self._group
        _tell(process, "send")
        return transfers

    @cached_property
    def folder(self) -> Path:
        """A folder of files of some GB, in the page cache."""
        folder = Path(self._stack.enter_context(TemporaryDirectory()))
        part: dict[str, torch.Tensor] = {}
        for name, tensor in self.on_host.items():
            part[name] = tensor
            if sum(one.nbytes for one in part.values()) > _FILE_BYTES:
                save_file(part, folder / f"{name}.safetensors")
                part = {}
        if part:
            save_file(part, folder / "last.safetensors")
        return folder


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None, "it is a pipe"
    print(line, file=process.stdin, flush=True)


def staged(engine: Engine, given: Given) -> float:
    return engine.update_weights(given.tensors.items()).pause_s


def direct(engine: Engine, given: Given) -> float:
    return engine.update_weights(given.tensors.items(), direct=True).pause_s


def single_values(engine: Engine, given: Given) -> float:
    engine.weights.start(partial=True)
    for name, tensor in given.tensors.items():
        if tensor.dim() == 2:
            places = torch.arange(0, tensor.numel(), 100, device=tensor.device, dtype=torch.int64)
            engine.weights.receive_delta(name, places, tensor.view(-1)[places])
    return engine.weights.finish().pause_s


def by_handles(engine: Engine, given: Given, *, is_direct: bool) -> float:
    transfers, info = Transfers(engine.weights), given.handles
    engine.weights.start(direct=is_direct)
    transfers.receive_vllm(info["names"], info["dtype_names"], info["shapes"], handles=info["ipc_handles"])
    return engine.weights.finish().pause_s


def by_nccl(engine: Engine, given: Given, *, is_direct: bool) -> float:
    engine.weights.start(direct=is_direct)
    names, dtype = list(given.shapes), str(given.dtype).removeprefix("torch.")
    row = names, [dtype] * len(names), [list(given.shapes[name]) for name in names]
    given.sent(engine).receive_bucket(GROUP, *row, is_flat=False)
    return engine.weights.finish().pause_s


def from_folder(engine: Engine, given: Given) -> float:
    return engine.update_weights_from_folder(given.folder).pause_s


WAYS: dict[str, Callable[[Engine, Given], float]] = {
    "staged": staged,
    "direct": direct,
    "values": single_values,
    "handles": partial(by_handles, is_direct=False),
    "handles direct": partial(by_handles, is_direct=True),
    "folder": from_folder,
    "nccl": partial(by_nccl, is_direct=False),
    "nccl direct": partial(by_nccl, is_direct=True),
}


def main() -> None:
    """Prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--requests", type=positive, default=8)
    parser.add_argument("--ways", type=names_of(WAYS), default=[name for name in WAYS if "nccl" not in name])
    arguments = parser.parse_args()
    if any("nccl" in name for name in arguments.ways):
        need_gpu(2)
    config = EngineConfig.from_yaml(arguments.config)
    runtime = config.runtime.model_copy(update={"mem_fraction_static": _OF_ENGINE})
    parts = assemble(config.model_copy(update={"runtime": runtime}), Timeline())
    live = parts.live
    if isinstance(live, str):
        raise WeightUpdateError(live)
    is_quantised = any(part.kept is not None for spec in live.specs for part in spec.parts)
    if is_quantised and "values" in arguments.ways:
        arguments.ways.remove("values")
        print("values is left out: those of quantised weights are not taken one by one")
    ways = {name: WAYS[name] for name in arguments.ways}
    found = Rounds()
    with Engine.from_parts(parts) as engine, ExitStack() as stack:
        given = Given(live, stack)
        machine = machine_line() if torch.cuda.is_available() else "a CPU"
        of_all = f"{given.num_bytes / 1e9:.2f} GB in {len(given.shapes)} tensors"
        print(f"{machine}; {of_all}, {arguments.requests} requests")
        held = []
        for _ in range(arguments.rounds + 1):
            for name, way in ways.items():
                running = [engine.stream([7, index + 1], greedy(4096)) for index in range(arguments.requests)]
                for stream in running:
                    next(stream)
                pause_s = found.timed(f"{name}, in all", partial(way, engine, given))
                found.add(f"{name}, pause of steps", pause_s * 1e3)
                engine.pause("abort")
                engine.resume()
            held.append(_held(given.device))
    found.show()
    print(f"held behind the first of {len(held)} rounds: {held[0]}; behind the last: {held[-1]}")


def _held(device: torch.device) -> str:
    """Memory that the device has given to all processes, and that this one has of the host."""
    status = Path("/proc/self/status").read_text().splitlines()
    of_host = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    text = f"{of_host / 1024:.0f} MiB of the host"
    if device.type != "cuda":
        return text
    free, total = memory_bytes(device)
    return f"{(total - free) / 2**20:.0f} MiB of the device, {text}"


if __name__ == "__main__":
    with told_in_one_line():
        main()
