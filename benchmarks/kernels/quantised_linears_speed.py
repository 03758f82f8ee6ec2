"""Microseconds of one layer's linears with bfloat16 weights and with those in few bits, by number of tokens.

    python -m benchmarks.kernels.quantised_linears_speed [--tokens 1,8,16,32,64] [--each] [--sweep] [--shape 8b]

Needs a Hopper GPU. A CUDA graph runs the linears of many layers with their own weights, so that weights come from the
GPU's memory. They are qkv, o with its residual and the next norm, gate_up with its activation, down with its residual
and norm. Of fp8, `row` weights have a scale a row, `group` weights one for 128 inputs, as `int4` ones. `zeros` have
zero points too; `mxfp4` and `nvfp4` are floats of four bits. --each times the four linears apart, each in a chain of
its own kind. It gives the rate of reading its weight, in GB/s and as a share of the rate of a sum over a gigabyte, and
its error. --head times the shape's head in each form, too. --sweep does all that for several divisions of the
work beside the chosen one. Every form's outputs are compared with float32 first; an `error` is the worst token's
distance over torch's in bfloat16.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, silu

from benchmarks.binaries import binaries_of
from benchmarks.script import names_of, need_hopper, parser_of, positives
from mllm_compile.bench.timing.graph import graph_us, read_rate
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.errors import CompileError, DeviceError
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.ops.stream_linear import ops as bf16_ops
from mllm_compile.runtime.ops.stream_linear.linear import bucket_of
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling as choose_bf16_tiling
from mllm_compile.runtime.ops.stream_linear.shapes import is_streamed
from mllm_compile.runtime.ops.stream_linear.streamed_ops import StreamedOps
from mllm_compile.runtime.ops.stream_quantised import few, tiles
from mllm_compile.runtime.ops.stream_quantised import ops as quantised_ops
from mllm_compile.runtime.ops.stream_quantised.linear import QuantisedKind, QuantisedTiling
from mllm_compile.runtime.ops.stream_quantised.shapes import MAX_TOKENS, choose_tiling
from mllm_compile.runtime.ops.stream_quantised.shapes import is_streamed as is_quantised_streamed
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4, NVFP4, SCALES, VALUES, WeightScheme, third_role

SHAPES = {"8b": (4096, 4096, 12288, 6144), "4b": (2560, 4096, 9728, 6144), "0.6b": (1024, 2048, 3072, 4096)}
HEAD_ROWS = 151936
LINEARS = ("qkv", "o", "gate_up", "down")
# None: plain weights. A group of 0 is a row.
FORMS = {
    "bf16": None,
    "row": WeightScheme("fp8", 0),
    "group": WeightScheme("fp8", 128),
    "int4": WeightScheme("int4_lanes", 128, torch.bfloat16),
    "zeros": WeightScheme("int4_lanes", 128, torch.float16, has_zeros=True),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}
EPS = 1e-6
MOST_LAYERS, LEAST_BYTES = 36, 1 << 30  # of a chain: many times the L2 cache


@dataclass
class Weight:
    """A linear's weight in one form: one tensor, or a scheme's."""

    tensors: tuple[torch.Tensor | None, ...]
    columns: int
    scheme: WeightScheme | None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors if tensor is not None)

    def exact(self) -> torch.Tensor:
        values = self.tensors[0]
        if self.scheme is None:
            return values.float()
        tensors = dict(zip((VALUES, SCALES, third_role(self.scheme.kind)), self.tensors, strict=True))
        return dequantised(tensors, self.scheme.kind, self.scheme.group, self.columns, torch.float32)


def random_weight(rows: int, columns: int, form: str) -> Weight:
    plain = torch.randn(rows, columns, device="cuda") * 0.02
    scheme = FORMS[form]
    if scheme is None:
        return Weight((plain.bfloat16(),), columns, None)
    scheme = replace(scheme, group=scheme.group or columns)
    made = quantised(plain, scheme)
    return Weight((made[VALUES], made[SCALES], made.get(third_role(scheme.kind))), columns, scheme)


class Chain:
    """The linears of several layers in one form, for a number of tokens."""

    def __init__(self, shape: str, form: str, tokens: int, num_layers: int) -> None:
        hidden, heads, ffn, qkv = SHAPES[shape]
        self.sizes = {"qkv": (qkv, hidden), "o": (hidden, heads), "gate_up": (2 * ffn, hidden), "down": (hidden, ffn)}
        self.form = form
        self.layers = [
            {name: random_weight(*size, form) for name, size in self.sizes.items()} for _ in range(num_layers)
        ]
        self.norm = torch.rand(hidden, device="cuda").bfloat16() + 0.5
        self.set_tokens(tokens)

    def set_tokens(self, tokens: int) -> None:
        self.x = {name: torch.randn(tokens, size[1], device="cuda").bfloat16() for name, size in self.sizes.items()}
        self.residual = torch.randn(tokens, self.sizes["o"][0], device="cuda").bfloat16()
        # Of what qkv and gate_up read: as many as down and o leave.
        kinds = self.kinds()
        self.squares = {
            name: self.x[name].float().pow(2).unflatten(-1, (kinds[before].next_blocks, -1)).sum(-1)
            for name, before in (("qkv", "down"), ("gate_up", "o"))
        }

    def kinds(self) -> dict[str, Any]:
        """The kernels' kinds, by linear."""
        ops, weights = _ops(self.form), self.layers[0]
        o, down = (ops.residual_kind(weights[name].tensors, norm_next=True) for name in ("o", "down"))
        qkv, gate_up = (
            ops.plain_kind(weights[name].tensors, None, name == "gate_up", False, False) for name in ("qkv", "gate_up")
        )
        return {
            "qkv": replace(qkv, norm_blocks=down.next_blocks),
            "o": o,
            "gate_up": replace(gate_up, norm_blocks=o.next_blocks),
            "down": down,
        }

    def run_one(self, name: str, weight: Weight, x: torch.Tensor, squares: Any, residual: torch.Tensor) -> Any:
        op = torch.ops.mllm
        plain, with_norm = (
            (op.stream_linear, op.stream_linear_residual_norm)
            if self.form == "bf16"
            else (op.stream_quantised_linear, op.stream_quantised_linear_residual_norm)
        )
        if name in ("o", "down"):
            return with_norm(x, *weight.tensors, residual, self.norm)
        return plain(x, *weight.tensors, squares, EPS, name == "gate_up")

    def run_layers(self) -> None:
        h, scaled, squares = self.residual, self.x["qkv"], self.squares["qkv"]
        for weights in self.layers:
            self.run_one("qkv", weights["qkv"], scaled, squares, h)
            h, scaled, squares = self.run_one("o", weights["o"], self.x["o"], squares, h)
            active = self.run_one("gate_up", weights["gate_up"], scaled, squares, h)
            h, scaled, squares = self.run_one("down", weights["down"], active, squares, h)

    def run_each(self, name: str) -> None:
        for weights in self.layers:
            self.run_one(name, weights[name], self.x[name], self.squares.get(name), self.residual)

    def errors(self) -> dict[str, float]:
        """The distance from float32 of each linear, over torch's in bfloat16."""
        found = {}
        for name, weight in self.layers[0].items():
            x, exact_weight = self.x[name], weight.exact()
            squares = self.squares.get(name)
            true = linear(x.float(), exact_weight)
            theirs = linear(x, exact_weight.bfloat16())
            ours = self.run_one(name, weight, x, squares, self.residual)
            if name in ("o", "down"):
                true, theirs, ours = self.residual.float() + true, self.residual + theirs, ours[0]
            else:
                factor = torch.rsqrt(self.squares[name].sum(-1, keepdim=True) / x.shape[-1] + EPS)
                true, theirs = true * factor, (theirs.float() * factor).bfloat16()
            if name == "gate_up":
                true, theirs = (silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1] for both in (true, theirs))
            found[name] = off_by(ours, true) / off_by(theirs, true)
        return found


def off_by(values: torch.Tensor, true: torch.Tensor) -> float:
    return ((values.float() - true).norm(dim=-1) / true.norm(dim=-1)).max().item()


def _ops(form: str) -> StreamedOps:
    return (bf16_ops if form == "bf16" else quantised_ops).STREAMED


def load(compiler: KernelCompiler, tilings: Sequence[Any], load_kernels: Callable[..., None]) -> None:
    load_kernels(tilings, binaries_of(compiler, tilings), torch.device("cuda:0"))


def divisions(chain: Chain, tokens: int, sweep: bool) -> Iterator[tuple[str, list[Any]]]:
    """Names and tilings of the four linears: those that are chosen, and others, each where a linear has such a one."""
    kinds, bucket = list(chain.kinds().values()), bucket_of(tokens)
    if chain.form == "bf16":
        yield "chosen", [choose_bf16_tiling(kind, bucket) for kind in kinds]
        return
    chosen = [choose_tiling(kind, bucket) for kind in kinds]
    yield "chosen", chosen
    if sweep:
        by_name: dict[str, list[QuantisedTiling]] = {}
        for at, kind in enumerate(kinds):
            for name, tiling in sweep_tilings(kind, bucket):
                by_name.setdefault(name, list(chosen))[at] = tiling
        yield from by_name.items()


def sweep_tilings(kind: QuantisedKind, tokens: int) -> Iterator[tuple[str, QuantisedTiling]]:
    """Other tilings for a bucket of tokens, with a name each that says how they divide any linear."""
    if tokens > few.MAX_TOKENS or not few.takes(kind, tokens):
        yield from best_tiles(kind, tokens)
        return
    if tokens > few.FEWEST_TOKENS:
        yield "tiles", tiles.choose(kind, tokens)
    for tiling in few.all_tilings(kind, tokens):
        yield f"split {tiling.split}, pieces of {tiling.piece // kind.values_a_byte} bytes", tiling


def best_tiles(kind: QuantisedKind, tokens: int) -> Iterator[tuple[str, QuantisedTiling]]:
    """The best tiling of each number of blocks of a cluster, of a tile's warp groups that divide columns, of panels of
    a stage, and room."""
    found: dict[str, QuantisedTiling] = {}
    for tiling in sorted(tiles.all_tilings(kind, tokens), key=tiles.cost):
        room = "beside" if tiling.is_beside else "alone"
        found.setdefault(f"split {tiling.split} K{tiling.column_groups} P{tiling.panels} {room}", tiling)
    yield from found.items()


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positives, default="1,8,16,32,64")
    parser.add_argument("--forms", type=names_of(FORMS), default=",".join(FORMS))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--each", action="store_true", help="times the four linears apart too")
    parser.add_argument("--head", action="store_true", help="the shape's head too")
    parser.add_argument("--sweep", action="store_true", help="other divisions too")
    options = parser.parse_args(arguments)
    need_hopper()
    torch.manual_seed(0)
    print(f"{machine_line()}, {options.shape}, microseconds a layer")
    limit = read_rate()
    print(f"a sum reads {limit:.0f} GB/s")
    of_each = "".join(f"{name:>26}" for name in LINEARS) if options.each else ""
    print(f"{'form':6}{'tokens':>7}{'layer':>8}{'GB/s':>7}{'read':>6}{'error':>7}{of_each}  division")
    with KernelCompiler() as compiler:
        for form in options.forms:
            _measure(compiler, form, options, limit)
            if options.head:
                _measure_head(compiler, form, options, limit)
    return 0


def _measure_head(compiler: KernelCompiler, form: str, options: argparse.Namespace, limit: float) -> None:
    hidden, ops = SHAPES[options.shape][0], _ops(form)
    weight = random_weight(HEAD_ROWS, hidden, form)
    run = torch.ops.mllm.stream_linear if form == "bf16" else torch.ops.mllm.stream_quantised_linear
    for tokens in options.tokens:
        x, squares = (
            torch.randn(tokens, hidden, device="cuda").bfloat16(),
            torch.rand(tokens, hidden // 16, device="cuda"),
        )
        kind, bucket = ops.plain_kind(weight.tensors, squares, False, False, False), bucket_of(tokens)
        if form == "bf16":
            if not is_streamed(HEAD_ROWS, hidden, tokens):
                continue
            tilings: list[Any] = [choose_bf16_tiling(kind, bucket)]
        elif not is_quantised_streamed(kind, tokens):
            continue
        else:
            tilings = [choose_tiling(kind, bucket)]
            if options.sweep:
                tilings += [tiling for _, tiling in sweep_tilings(kind, bucket)]
        for tiling in tilings:
            load(compiler, [tiling], ops.load_kernels)
            time = graph_us(partial(run, x, *weight.tensors, squares, EPS, False))
            rate = weight.num_bytes / time / 1e3
            print(f"{form:6}{tokens:7}{time:8.1f}{rate:7.0f}{rate / limit:6.0%}  head, {tiling.name}")


def _measure(compiler: KernelCompiler, form: str, options: argparse.Namespace, limit: float) -> None:
    hidden, heads, ffn, qkv = SHAPES[options.shape]
    scheme = FORMS[form]
    layer_bytes = hidden * (heads + 3 * ffn + qkv) * (2 if scheme is None else 1 if scheme.kind == "fp8" else 0.5)
    chain = Chain(options.shape, form, 1, max(MOST_LAYERS, int(LEAST_BYTES // layer_bytes)))
    for tokens in options.tokens:
        if scheme is not None and tokens > MAX_TOKENS:
            continue
        chain.set_tokens(tokens)
        for name, tilings in divisions(chain, tokens, options.sweep):
            try:
                load(compiler, tilings, _ops(form).load_kernels)
                print(_line(chain, tokens, name, options.each, limit))
            except (DeviceError, CompileError) as error:  # a division that cannot be launched hides no other
                print(f"{form:6}{tokens:7}  {name}: {error}")
    del chain
    torch.cuda.empty_cache()


def _line(chain: Chain, tokens: int, name: str, each: bool, limit: float) -> str:
    errors, count = chain.errors(), len(chain.layers)
    error = max(errors.values(), key=lambda error: (math.isnan(error), error))
    layer = graph_us(chain.run_layers) / count
    read = sum(weight.num_bytes for weight in chain.layers[0].values())
    rate = read / layer / 1e3
    line = f"{chain.form:6}{tokens:7}{layer:8.1f}{rate:7.0f}{rate / limit:6.0%}{error:7.2f}"
    if each:
        for one in LINEARS:
            time = graph_us(partial(chain.run_each, one)) / count
            rate = chain.layers[0][one].num_bytes / time / 1e3
            line += f"{time:9.1f} ({rate:4.0f} {rate / limit:4.0%} {errors[one]:4.2f})"
    return f"{line}  {name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
