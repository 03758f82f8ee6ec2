"""Milliseconds of loads of an adapter and of their parts, and the longest gap between tokens of others meanwhile.

    python -m benchmarks.steps.adapter_load_speed CONFIG [--requests 8] [--rank 16] [--rounds 5]

It writes two adapters of all linears, of random numbers in the model's type, and reads them once. So loads read the
page cache. In each round the name gets the other one in its place. A load is timed in an idle engine, and beside
requests without an adapter, whose tokens are awaited one by one; gaps without a load are beside. The parts are what a
load calls, one after another, in an idle engine.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.rounds import Rounds
from benchmarks.script import greedy, parser_of, positive, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.adapters.base_model import BaseModel, module_of
from mllm_compile.adapters.peft_folder import TENSOR_FILE, read_adapter
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.config.schema import LoraConfig
from mllm_compile.engine.core.adapter_queue import AdapterParts
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.process.timeline import Timeline

_NAME = "a"


def write_adapter(folder: Path, base: BaseModel, rank: int, seed: int) -> Path:
    """A folder as PEFT writes it, of all linears."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for weight, (outputs, inputs) in base.targets.items():
        for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=generator) * 0.02
            tensors[f"base_model.model.{module_of(weight)}.lora_{kind}.weight"] = values.to(base.dtype)
    save_file(tensors, folder / TENSOR_FILE)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


class Decodes:
    """Requests that decode, and when the tokens of one come."""

    def __init__(self, engine: Engine, count: int, most_tokens: int) -> None:
        self._engine, self._count, self._params = engine, count, greedy(most_tokens)

    def longest_gap_ms(self, beside: Callable[[], None]) -> tuple[float, float]:
        """The longest gap while `beside` runs, and before it."""
        times: list[float] = []
        ends = threading.Event()
        others = [self._engine.stream([7, 8, index], self._params) for index in range(1, self._count)]
        reader = threading.Thread(target=self._read, args=(times, ends))
        reader.start()
        while len(times) < 100 and reader.is_alive():
            time.sleep(0.001)
        began, first = time.perf_counter(), len(times)
        beside()
        ended = time.perf_counter()
        while times[-1] < ended and reader.is_alive():
            time.sleep(0.001)
        ends.set()
        for stream in others:
            stream.close()
        reader.join()
        if times[-1] < ended:
            raise SystemExit(f"{len(times)} tokens ended {ended - times[-1]:.1f} s ahead of the load")
        during = [later - earlier for earlier, later in pairwise(times) if later > began and earlier < ended]
        before = [later - earlier for earlier, later in pairwise(times[20:first])]
        return max(during) * 1e3, max(before) * 1e3

    def _read(self, times: list[float], ends: threading.Event) -> None:
        with closing(self._engine.stream([7, 8], self._params)) as stream:
            for _ in stream:
                times.append(time.perf_counter())
                if ends.is_set():
                    return


def parts_of_a_load(table: Rounds, engine: Engine, parts: AdapterParts, folder: Path) -> None:
    """Times what a load calls, of a slot that nobody uses."""
    writer, between = parts.writer, engine.core.between_steps
    adapter = table.timed("  read and check", lambda: read_adapter(folder, parts.base))
    prepared = table.timed("  copy what is not in pinned memory", lambda: writer.prepared(adapter.matrices))
    behind = table.timed("  take a slot between two steps", lambda: between(writer.moment))
    table.timed("  copy to the device", lambda: writer.write(writer.num_slots - 1, prepared, behind))


def main() -> None:
    """Prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=positive, default=8)
    parser.add_argument("--adapters", type=positive, default=8)
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=5)
    arguments = parser.parse_args()
    lora = LoraConfig(max_adapters=max(2, arguments.adapters), max_rank=arguments.rank)
    given = assemble(EngineConfig.from_yaml(arguments.config).model_copy(update={"lora": lora}), Timeline())
    parts = given.adapters
    assert parts is not None and given.config is not None, "of a config with a section lora"
    table = Rounds()
    with tempfile.TemporaryDirectory() as root, Engine.from_parts(given) as engine:
        folders = [write_adapter(Path(root) / str(seed), parts.base, arguments.rank, seed) for seed in range(2)]
        size = sum((folder / TENSOR_FILE).stat().st_size for folder in folders) / 2e6
        machine = machine_line() if torch.cuda.is_available() else "a CPU"
        print(f"{machine}; {size:.0f} MB, {arguments.requests} requests")
        for folder in folders:
            (folder / TENSOR_FILE).read_bytes()
        load = partial(engine.load_adapter, _NAME, replace=True)
        decodes = Decodes(engine, arguments.requests, most_tokens=given.config.runtime.max_model_len - 8)
        for index in range(1 + arguments.rounds):
            folder = folders[index % 2]
            table.timed("load, idle", partial(load, folder))
            parts_of_a_load(table, engine, parts, folder)
            folder = folders[1 - index % 2]
            during, before = decodes.longest_gap_ms(partial(table.timed, "load beside decodes", partial(load, folder)))
            table.add("longest gap between tokens of others", during)
            table.add("  without a load", before)
            load(folder)
    table.show()


if __name__ == "__main__":
    with told_in_one_line():
        main()
