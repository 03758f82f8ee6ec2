"""How fast a saved mixture of experts is read into a GPU, beside a dense model of the same size.

    python -m benchmarks.server.load_speed [--gigabytes 16] [--folder /dev/shm]

Writes a checkpoint of each shape of configs/shapes, with as many layers as make so many GB (a dense 8B has 16), as
their authors publish them: experts one by one, tensors in the order of their names. The files are in the page cache
when they are read, as in a second start. Each is read into its final place on the device by the loader's own plan, in
turns; the last figures are the medians. The table is what a runtime stores of this plan: where each tensor goes.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import parser_of, positive, told_in_one_line
from mllm_compile.bench.timing.clock import wall_seconds
from mllm_compile.bench.timing.rounds import by_turns
from mllm_compile.checkpoint.plan import plan_weights, read_checkpoint
from mllm_compile.checkpoint.quantised import read_tensors
from mllm_compile.model.hf_model import build_on_meta
from mllm_compile.process.console import print_table
from mllm_compile.runtime.files.json_data import parse_json
from mllm_compile.runtime.weights.loader import allocate_weights, load_weights
from mllm_compile.runtime.weights.spec import WeightSpec
from mllm_compile.runtime.weights.table import weights_from_json, weights_to_json

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
NAMES = ("qwen3-8b", "qwen3-30b-a3b")
DTYPE = torch.bfloat16
FILES = 5  # a model's, as they are published
BLOCK_BYTES = 32 << 20


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gigabytes", type=positive, default=16, help="of each checkpoint, at least")
    parser.add_argument("--folder", type=Path, help="where they are written; default: the folder for temporary files")
    parser.add_argument("--repeats", type=positive, default=3)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="load_speed_", dir=args.folder) as scratch:
        planned = {name: write_and_plan(name, Path(scratch, name), args.gigabytes) for name in NAMES}
        weights = {name: allocate_weights(specs, device) for name, specs in planned.items()}
        tables = {name: json.dumps(weights_to_json(specs)).encode() for name, specs in planned.items()}
        read = {name: weights_from_json(parse_json(table)) for name, table in tables.items()}

        def read_table(name: str) -> float:
            return wall_seconds(lambda: weights_from_json(parse_json(tables[name])))

        def load(name: str) -> float:
            return wall_seconds(lambda: load_weights(read[name], weights[name], Path(scratch, name)))

        parts = {"table": read_table, "weights": load}
        takes = {(part, name): partial(take, name) for name in NAMES for part, take in parts.items()}
        seconds = by_turns(takes, args.repeats, warm_ups=0)
    sizes = {name: sum(weight.nbytes for weight in of_model.values()) / 1e9 for name, of_model in weights.items()}
    rows = [
        (
            name,
            f"{sizes[name]:.1f}",
            str(sum(len(spec.parts) for spec in planned[name])),
            *figures(sizes[name], seconds["weights", name]),
            f"{statistics.median(seconds['table', name]) * 1e3:.1f}",
        )
        for name in NAMES
    ]
    header = ("model", "GB", "tensors", "s", "GB/s", "from", "to", "table, ms")
    print_table(sys.stdout, f"read into {device}", header, rows)


def figures(gigabytes: float, seconds: list[float]) -> tuple[str, ...]:
    middle = statistics.median(seconds)
    rates = (gigabytes / one for one in (middle, max(seconds), min(seconds)))
    return (f"{middle:.2f}", *(f"{rate:.1f}" for rate in rates))


def write_and_plan(name: str, folder: Path, gigabytes: int) -> list[WeightSpec]:
    """Writes the checkpoint and says what of it goes where."""
    config = json.loads((SHAPES / name / "config.json").read_text())
    folder.mkdir()
    whole, fewest = (num_bytes(folder, config, layers) for layers in (2, 1))
    of_layer = whole - fewest
    layers = max(1, math.ceil((gigabytes * 1e9 - (fewest - of_layer)) / of_layer))
    model = model_of(folder, config, layers)
    shapes = {key: (tuple(value.shape), DTYPE) for key, value in model.state_dict().items()}
    tensors = sorted(tensor for key, (shape, _) in shapes.items() for tensor in as_published(key, shape))
    of_file = -(-len(tensors) // FILES)
    shards = [tensors[start : start + of_file] for start in range(0, len(tensors), of_file)]
    files = [f"model-{number}.safetensors" for number in range(len(shards))]
    with ThreadPoolExecutor(FILES) as threads:
        list(threads.map(write_file, (folder / file for file in files), shards))
    return plan_weights(shapes, {}, read_checkpoint(read_tensors(folder, files, None), model))


def model_of(folder: Path, config: dict[str, Any], layers: int) -> Any:
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return build_on_meta(folder, DTYPE).model


def num_bytes(folder: Path, config: dict[str, Any], layers: int) -> int:
    return sum(value.nbytes for value in model_of(folder, config, layers).state_dict().values())


def as_published(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that a weight of Transformers' model is made of."""
    before, _, kind = key.rpartition(".experts.")
    if kind not in ("gate_up_proj", "down_proj"):
        yield key, shape
        return
    num_experts, outputs, inputs = shape
    for expert in range(num_experts):
        if kind == "down_proj":
            yield f"{before}.experts.{expert}.down_proj.weight", (outputs, inputs)
        else:
            yield f"{before}.experts.{expert}.gate_proj.weight", (outputs // 2, inputs)
            yield f"{before}.experts.{expert}.up_proj.weight", (outputs // 2, inputs)


def write_file(path: Path, tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file; its numbers are small and the same again and again."""
    header, end = {}, 0
    for name, shape in tensors:
        start, end = end, end + math.prod(shape) * DTYPE.itemsize
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = (torch.randn(BLOCK_BYTES // 2) * 0.02).to(DTYPE).view(torch.uint8).numpy().data
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, BLOCK_BYTES):
            file.write(block[: min(BLOCK_BYTES, end - start)])


if __name__ == "__main__":
    with told_in_one_line():
        main()
