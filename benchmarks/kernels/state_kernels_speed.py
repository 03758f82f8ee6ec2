"""Microseconds of one layer with a state by kind and batch, inside a CUDA graph, beside what its bytes take.

    python -m benchmarks.kernels.state_kernels_speed [--json FILE] [--prompts] [--apart] [--layers "gated delta" ssd …]
        [--copies] [--variants "conv._WARPS=4" "conv._WARPS=8 conv._DECODE_CHANNELS=512" …]

Needs an NVIDIA GPU and Triton. The shapes are Transformers' defaults for qwen3_5_text, and Nemotron-H-8B's,
Kimi-Linear's and Falcon-Mamba-7B's. A graph runs each kernel over several layers' states, more than the L2 cache holds.
Kernels are launched before those ahead have ended, as in a step; --apart has each begin when the one ahead has ended.
TB/s are the bytes of states and tokens, read and written once, over the time; the last column is their share of the
GPU's rate of reading one large tensor. --copies adds the time of a plain copy of as many bytes, half of them read and
half written, in a graph too. A variant sets constants of modules of runtime/ops/states/.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import mistake, need_gpu, parser_of
from mllm_compile.bench.timing.graph import graph_us, read_rate
from mllm_compile.bench.timing.record import append_record, machine_line
from mllm_compile.runtime import ops
from mllm_compile.runtime.attention.layer_kernels import FEW_TOKENS
from mllm_compile.runtime.state.layer import KINDS, CausalConv, GatedDelta, SelectiveScan, Ssd, StateKind

BATCHES = (1, 8, 16, 64, 256)
PROMPTS = ((1, 16), (1, 64), (1, 2048), (1, 8192), (8, 1024), (32, 2048))
COLD_BYTES = 256 << 20  # several times the L2 cache
MAX_LAYERS = 16


@dataclass(frozen=True)
class Shape:
    """A layer: its settings, sizes of its operands (without tokens), and the type of its outputs."""

    kind: StateKind
    operands: dict[str, tuple[int, ...]]
    out_dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "conv 8192": Shape(CausalConv("silu"), {"x": (8192,), "weight": (8192, 4)}),
    "gated delta": Shape(
        GatedDelta(qk_l2norm=True), {"q": (16, 128), "k": (16, 128), "v": (32, 128), "g": (32,), "beta": (32,)}
    ),
    "gated delta, a channel": Shape(
        GatedDelta(qk_l2norm=True), {"q": (32, 128), "k": (32, 128), "v": (32, 128), "g": (32, 128), "beta": (32,)}
    ),
    "ssd": Shape(
        Ssd(dt_softplus=True, dt_min=0.0, dt_max=None),
        {"x": (128, 64), "dt": (128,), "A": (128,), "B": (8, 128), "C": (8, 128), "D": (128,), "dt_bias": (128,)},
        torch.float32,
    ),
    "selective scan": Shape(
        SelectiveScan(dt_softplus=True),
        {
            "x": (8192,),
            "dt": (8192,),
            "A": (8192, 16),
            "B": (16,),
            "C": (16,),
            "D": (8192,),
            "z": (8192,),
            "dt_bias": (8192,),
        },
    ),
}


@dataclass(frozen=True)
class Result:
    """One line."""

    name: str
    requests: int
    tokens: int  # of each request
    microseconds: float
    bytes: int
    variant: str = ""  # of constants


def run(name: str, requests: int, tokens: int) -> Result:
    """Decodes (tokens = 1), or prompts of `tokens` tokens."""
    shape, total = SHAPES[name], requests * tokens
    operands = {
        key: torch.rand(size if key in shape.kind.constants else (total, *size), device="cuda").bfloat16()
        for key, size in shape.operands.items()
    }
    for key in ("g", "A"):
        if key in operands:
            operands[key] = -operands[key].float()
    shapes = {key: value.shape for key, value in operands.items()}
    state = shape.kind.state_shape(shapes)
    dtype = torch.bfloat16 if shape.kind.holds_inputs else torch.float32
    out = torch.empty(total, *shape.kind.out_shape(shapes), dtype=shape.out_dtype, device="cuda")
    per_layer = 2 * requests * math.prod(state) * dtype.itemsize
    count = min(MAX_LAYERS, max(2, COLD_BYTES // per_layer)) if total <= FEW_TOKENS or tokens == 1 else 1
    pools = [torch.zeros(requests + 1, *state, dtype=dtype, device="cuda") for _ in range(count)]
    rows = torch.arange(1, requests + 1, device="cuda")
    has_state = torch.ones(requests, dtype=torch.bool, device="cuda")
    bounds = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * tokens
    op = ops.op(f"{shape.kind.name}_states")
    absent = dict.fromkeys(set(shape.kind.operands) - set(operands))
    if tokens > 1 and total <= FEW_TOKENS and isinstance(shape.kind, GatedDelta | Ssd):
        absent["few_tokens"] = True
    settings = absent | asdict(shape.kind) | {"rows": rows, "has_state": has_state, "out": out}
    spans: dict[str, torch.Tensor | None] = dict.fromkeys(("sources", "starts", "ends"))
    if tokens > 1:
        spans = {"sources": rows, "starts": bounds[:-1].clone(), "ends": bounds[1:].clone()}

    def launch() -> None:
        for pool in pools:
            op(**operands, states=pool, **spans, **settings)

    moved = per_layer + sum(value.nbytes for value in operands.values()) + out.nbytes
    return Result(name, requests, tokens, graph_us(launch) / count, moved)


def copy_microseconds(num_bytes: int) -> float:
    """Microseconds of a copy that reads half of so many bytes and writes the other half, of several tensors in turn."""
    count = min(64, max(2, COLD_BYTES // num_bytes))
    pairs = [torch.empty(2, num_bytes // 2, dtype=torch.uint8, device="cuda") for _ in range(count)]

    def launch() -> None:
        for source, target in pairs:
            target.copy_(source)

    return graph_us(launch) / count


def set_constants(variant: str) -> None:
    """Sets what `MODULE.NAME=NUMBER …` says."""
    for one in variant.split():
        name, _, value = one.partition("=")
        module, _, constant = name.partition(".")
        place = importlib.import_module(f"mllm_compile.runtime.ops.states.{module}")
        if not isinstance(getattr(place, constant, None), int):
            mistake(f"{name} is no number of a module in runtime/ops/states")
        setattr(place, constant, int(value))


def launch_early() -> None:
    """Has Triton launch the kernels of runtime/ops/states/ as packages do: before those ahead of them have ended."""

    class Early:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., object]:
            return partial(self.kernel[grid], launch_pdl=True)

    folder = f"{ops.__name__}.states."
    for module in [module for name, module in sys.modules.items() if name.startswith(folder)]:
        if hasattr(module, "wrap_triton"):
            module.wrap_triton = Early  # type: ignore[attr-defined]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path, help="also add the figures to this file, as a line")
    parser.add_argument("--prompts", action="store_true", help="prompts in place of decodes")
    parser.add_argument("--copies", action="store_true", help="also copy as many bytes")
    parser.add_argument("--apart", action="store_true", help="each kernel begins when the one ahead has ended")
    parser.add_argument("--layers", nargs="+", choices=SHAPES, default=list(SHAPES), help="these alone")
    parser.add_argument("--variants", nargs="+", default=[""], help="of constants, each measured in turn")
    args = parser.parse_args()
    need_gpu()
    limit = read_rate() * 1e9
    print(f"{machine_line()}, read {limit / 1e12:.2f} TB/s")
    print(
        f"{'layer':24} {'requests':>8} {'tokens':>7} {'µs':>9} {'TB/s':>6} {'of read':>8}"
        + f"{'copy, µs':>9}" * args.copies
    )
    from mllm_compile.runtime.ops.dependent_launch import starts_early

    for kind in KINDS:
        ops.op(f"{kind}_states")
    if not args.apart and starts_early():
        launch_early()
    results = []
    for variant, name in itertools.product(args.variants, args.layers):
        set_constants(variant)
        print(variant, end="\n" if variant else "")
        for requests, tokens in PROMPTS if args.prompts else [(batch, 1) for batch in BATCHES]:
            result = replace(run(name, requests, tokens), variant=variant)
            results.append(result)
            rate = result.bytes / (result.microseconds * 1e-6)
            copied = f"{copy_microseconds(result.bytes):9.1f}" if args.copies else ""
            print(
                f"{name:24} {requests:8} {tokens:7} {result.microseconds:9.1f} {rate / 1e12:6.2f} {rate / limit:8.2f}"
                f"{copied}",
            )
            torch.cuda.empty_cache()
    if args.json is not None:
        append_record(args.json, __doc__, args, {"read": limit, "layers": [asdict(result) for result in results]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
