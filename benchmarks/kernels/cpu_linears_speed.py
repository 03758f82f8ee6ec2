"""A CPU's linears in panels beside the libraries', float32 to four bits, by turns on one thread.

    python -m benchmarks.kernels.cpu_linears_speed

Weights lie in copies that no cache holds. Of each way the fastest of many short rounds counts, as others may hold the
cores.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from benchmarks.script import parser_of, positive, positives, told_in_one_line
from mllm_compile.bench.timing.rounds import by_turns
from mllm_compile.config.resolution.device import has_panels
from mllm_compile.kernels.cpu import compiled
from mllm_compile.runtime.cpu.load import load_library
from mllm_compile.runtime.ops.panels import ops  # noqa: F401  (defines the ops)
from mllm_compile.runtime.ops.panels.layout import VALUES_UNIT, put_in_panels
from mllm_compile.runtime.ops.panels.library import PANEL_LINEARS
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import SCALES, VALUES, WeightScheme, third_role

_COPIED = 64_000_000  # numbers of all copies of a weight together
_SHARE_S = 0.001  # that a way takes in a round: less than a scheduler gives to a process
_BASE = "float32, F.linear"


class Way(NamedTuple):
    """A way to multiply: what a weight becomes, what inputs become, the product, and the weight that it stands for."""

    make: Callable[[], Any]
    inputs: Callable[[torch.Tensor], torch.Tensor]
    run: Callable[[torch.Tensor, Any], torch.Tensor]
    weight: torch.Tensor


def _panels(tensor: torch.Tensor, unit: int) -> torch.Tensor:
    made = tensor.clone()
    put_in_panels(made, unit)
    return made


def _ways(weight: torch.Tensor) -> dict[str, Way]:
    onednn, half = torch.ops.mkldnn, weight.bfloat16()

    def pointwise(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = onednn._linear_pointwise(x, packed, None, "none", [], "")
        return product

    def panel(x: torch.Tensor, panels: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mllm.panel_linear(x, panels, None)
        return product

    def integers(scheme: WeightScheme, op: Callable[..., torch.Tensor]) -> Way:
        tensors = quantised(weight, scheme)
        third = tensors.get(third_role(scheme.kind))
        stands_for = dequantised(tensors, scheme.kind, scheme.group, weight.shape[1], torch.float32)
        lying = (
            _panels(tensors[VALUES], VALUES_UNIT),
            _panels(tensors[SCALES], tensors[SCALES].itemsize),
            None if third is None else _panels(third, third.itemsize),
        )

        def run(x: torch.Tensor, made: Any) -> torch.Tensor:
            return op(x, *made, None, scheme.group)

        return Way(lambda: tuple(one if one is None else one.clone() for one in lying), lambda x: x, run, stands_for)

    exact, rounded = torch.ops.mllm.integer_panel_linear, torch.ops.mllm.rounded_panel_linear

    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    return {
        _BASE: Way(weight.clone, same, functional.linear, weight),
        "float32, oneDNN packed": Way(lambda: onednn._reorder_linear_weight(weight, 8), same, pointwise, weight),
        "float32, panels": Way(lambda: _panels(weight, VALUES_UNIT), same, panel, weight),
        "bfloat16, F.linear": Way(half.clone, torch.Tensor.bfloat16, functional.linear, weight),
        "bfloat16, oneDNN packed": Way(
            lambda: onednn._reorder_linear_weight(half, 8), torch.Tensor.bfloat16, pointwise, weight
        ),
        "bfloat16, panels": Way(lambda: _panels(half, VALUES_UNIT), torch.Tensor.bfloat16, panel, weight),
        "int8, a scale a row, inputs in eight bits": integers(WeightScheme("int8", weight.shape[1]), rounded),
        "int8 in groups of 32 (Q8_0)": integers(WeightScheme("int8", 32, torch.float16), exact),
        "the same, inputs in eight bits": integers(WeightScheme("int8", 32, torch.float16), rounded),
        "int8, oneDNN, product alone": _onednn_int8(weight),
        "int4 with offsets (Q4_1)": integers(WeightScheme("int4_offsets", 32, torch.float16), exact),
        "likewise, inputs in eight bits": integers(WeightScheme("int4_offsets", 32, torch.float16), rounded),
        "int4, torch's op, bfloat16": _torch_int4(weight),
    }


def _onednn_int8(weight: torch.Tensor) -> Way:
    """The library's product of inputs that are quantised already, with one scale for all."""
    tensors = quantised(weight, WeightScheme("int8", weight.shape[1]))
    scales, zeros = tensors[SCALES].flatten(), torch.zeros(len(weight), dtype=torch.int32)
    library = torch.ops.onednn

    def run(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = library.qlinear_pointwise(
            x, 0.03, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return product

    def inputs(x: torch.Tensor) -> torch.Tensor:
        return ((x / 0.03).round() + 128).clamp(0, 255).to(torch.uint8)

    stands_for = dequantised(tensors, "int8", weight.shape[1], weight.shape[1], torch.float32)
    return Way(lambda: library.qlinear_prepack(tensors[VALUES].clone(), None), inputs, run, stands_for)


def _torch_int4(weight: torch.Tensor) -> Way:
    scheme = WeightScheme("int4", 32, torch.bfloat16)
    tensors = quantised(weight, scheme)
    codes = torch.stack((tensors[VALUES] & 15, tensors[VALUES] >> 4), -1).flatten(1).int()
    scales = tensors[SCALES].T
    both = torch.stack((scales, torch.zeros_like(scales)), -1).contiguous()
    library = torch.ops.aten

    def run(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = library._weight_int4pack_mm_for_cpu(x, packed, 32, both)
        return product

    stands_for = dequantised(tensors, "int4", 32, weight.shape[1], torch.float32)
    make = lambda: library._convert_weight_to_int4pack_for_cpu(codes, 1)  # noqa: E731
    return Way(make, torch.Tensor.bfloat16, run, stands_for)


def _timed(way: Way, x: torch.Tensor, copies: int) -> Callable[[], float]:
    """Seconds of a product, over the copies of the weight in turn."""
    given, weights, at = way.inputs(x), [way.make() for _ in range(copies)], 0
    way.run(given, weights[0])
    begin = time.perf_counter()
    way.run(given, weights[1])
    count = max(1, int(_SHARE_S / (time.perf_counter() - begin)))

    def take() -> float:
        nonlocal at
        start = time.perf_counter()
        for index in range(count):
            way.run(given, weights[(at + index) % copies])
        seconds = time.perf_counter() - start
        at = (at + count) % copies
        return seconds / count

    return take


def _error(way: Way, x: torch.Tensor) -> float:
    right = x.double() @ way.weight.double().T
    return ((way.run(way.inputs(x), way.make()).double() - right).norm() / right.norm()).item()


def _rows(rows: int, columns: int, tokens: int, repeats: int) -> Mapping[str, tuple[float, float, float]]:
    """Microseconds, ratio and error of each way."""
    torch.manual_seed(0)
    ways, x = _ways(torch.randn(rows, columns) * 0.02), torch.randn(tokens, columns)
    copies = max(2, min(64, -(-_COPIED // (rows * columns))))
    times = by_turns({name: _timed(way, x, copies) for name, way in ways.items()}, repeats)
    return {
        name: (1e6 * min(times[name]), min(times[_BASE]) / min(times[name]), _error(way, x))
        for name, way in ways.items()
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", type=positives, action="append", help="outputs,inputs; may be given several times")
    parser.add_argument("--tokens", type=positives, default=[1, 8, 64, 512])
    parser.add_argument("--repeats", type=positive, default=101)
    parser.add_argument("--threads", type=positive, default=1)
    arguments = parser.parse_args()
    if not has_panels("cpu"):
        sys.exit("needs a CPU with AVX2")
    torch.set_num_threads(arguments.threads)
    with told_in_one_line(), TemporaryDirectory() as folder:
        binary = compiled(PANEL_LINEARS, Path(folder) / "cpu")
        load_library(PANEL_LINEARS, {PANEL_LINEARS.name: binary})
    for rows, columns in arguments.shape or [(1536, 576), (576, 1536), (3072, 1024)]:
        print(f"{columns} inputs, {rows} outputs; times as fast as {_BASE}, µs of that, and errors")
        found = {tokens: _rows(rows, columns, tokens, arguments.repeats) for tokens in arguments.tokens}
        print(f"| | {' | '.join(map(str, arguments.tokens))} | error |\n|---|{'---:|' * (len(found) + 1)}")
        for name in next(iter(found.values())):
            cells = [f"{of[name][0]:.0f} µs" if name == _BASE else f"{of[name][1]:.1f}" for of in found.values()]
            print(f"| {name} | {' | '.join(cells)} | {max(of[name][2] for of in found.values()):.1e} |")


if __name__ == "__main__":
    main()
