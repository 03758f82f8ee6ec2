"""Microseconds of linears of few tokens by shape and by division of the work, and the rate of reading weights.

    python -m benchmarks.kernels.stream_linears_speed [--tokens 1,8] [--linears 4096x21504:residual …]
        [--rows 4,66,8,2 …] [--sweep] [--library]

Needs a Hopper GPU. A linear is NxK, with `residual` (and the sums for a norm behind it), `norm` (ahead of it), `gated`
or `squared_relu`, joined by +; by default Nemotron-H-8B's. A CUDA graph runs it with one weight after another, a
gigabyte of them and more, so that they come from the GPU's memory. --rows are divisions of rows.cu besides the chosen
one: SPLIT,CLUSTERS,WARPS,RESIDENT. The last line of each runs all linears one behind another, as layers do. An error is
    the worst token's distance from float32 over torch's in bfloat16. With more than 8 tokens --sweep times divisions of
    tiles.cu and wide.cu besides, and all linears with each its fastest, by turns with the chosen ones. --library times
    the product alone by torch, without what is ahead of it and behind.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from benchmarks.kernels.quantised_linears_speed import EPS, load, off_by
from benchmarks.script import mistake, need_hopper, parser_of, positives, told_in_one_line
from mllm_compile.bench.timing.graph import graph_us, read_rate
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.errors import CompileError, DeviceError
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.ops.stream_linear import rows, tiles
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind, LinearTiling, bucket_of
from mllm_compile.runtime.ops.stream_linear.ops import STREAMED
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling
from mllm_compile.runtime.ops.stream_linear.wide import WideTiling

NEMOTRON_H = (
    "18560x4096:norm",
    "4096x8192:residual",
    "21504x4096:norm+squared_relu",
    "4096x21504:residual",
)
MARKS = ("residual", "norm", "gated", "squared_relu")
LEAST_BYTES = 1 << 30
CHAINED_LAYERS = 12
CHOSEN = "chosen"
MOST_LANE_INPUTS = 96  # registers of a lane


@dataclass
class Linear:
    """One linear, with as many weights as a chain has of it."""

    name: str
    weights: list[torch.Tensor]
    marks: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Linear:
        size, _, marks = text.partition(":")
        numbers = [int(number) for number in size.split("x") if number.isdigit()]
        given = frozenset(marks.split("+")) if marks else frozenset()
        if len(numbers) != 2 or not given <= set(MARKS):
            mistake(f"{text!r} is no linear: expected NxK, or NxK:MARKS of {', '.join(MARKS)}")
        count = max(CHAINED_LAYERS, LEAST_BYTES // (numbers[0] * numbers[1] * 2))
        weights = [(torch.randn(*numbers, device="cuda") * 0.02).bfloat16() for _ in range(count)]
        return cls(text, weights, given)

    def __post_init__(self) -> None:
        self.set_tokens(1)

    def set_tokens(self, tokens: int) -> None:
        n, k = self.weights[0].shape
        self.x = torch.randn(tokens, k, device="cuda").bfloat16()
        self.residual = torch.randn(tokens, n, device="cuda").bfloat16()
        self.next_norm = torch.rand(n, device="cuda").bfloat16() + 0.5
        self.squares = self.x.float().pow(2).unflatten(-1, (-1, 16)).sum(-1) if "norm" in self.marks else None

    @property
    def kind(self) -> LinearKind:
        if "residual" in self.marks:
            return STREAMED.residual_kind((self.weights[0],), norm_next=True)
        of_marks = ("gated" in self.marks, False, "squared_relu" in self.marks)
        return STREAMED.plain_kind((self.weights[0],), self.squares, *of_marks)

    def run_one(self, weight: torch.Tensor) -> torch.Tensor:
        op = torch.ops.mllm
        if "residual" in self.marks:
            return op.stream_linear_residual_norm(self.x, weight, self.residual, self.next_norm)[0]
        of_marks = ("gated" in self.marks, None, "squared_relu" in self.marks)
        return op.stream_linear(self.x, weight, self.squares, EPS, *of_marks)

    def run(self) -> None:
        for weight in self.weights:
            self.run_one(weight)

    def error(self) -> float:
        weight = self.weights[-1]
        return off_by(self.run_one(weight), self._computed(weight, torch.float32)) / off_by(
            self._computed(weight, torch.bfloat16), self._computed(weight, torch.float32)
        )

    def _computed(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = self.x.to(dtype) @ weight.to(dtype).T
        if self.squares is not None:
            out = (out.float() * torch.rsqrt(self.squares.sum(-1, keepdim=True) / self.x.shape[-1] + EPS)).to(dtype)
        if "gated" in self.marks:
            gate, up = out.chunk(2, -1)
            out = torch.nn.functional.silu(gate) * up
        if "squared_relu" in self.marks:
            out = out.relu().square()
        return self.residual.to(dtype) + out if "residual" in self.marks else out


def tiling_of(kind: LinearKind, bucket: int, division: str) -> LinearTiling | None:
    """The chosen tiling, or rows.cu's of a division; None where it does not take the linear."""
    if division == CHOSEN:
        return choose_tiling(kind, bucket)
    given = rows.Division(kind.columns, *map(int, division.split(",")))
    if bucket > rows.MAX_TOKENS or kind.columns % (rows.STEP * given.split):
        return None
    tiling = rows.choose(kind, given)
    steps = -(-kind.columns // (tiling.split * tiling.piece)) * -(-tiling.piece // (rows.STEP * tiling.warps))
    return tiling if 4 * steps <= MOST_LANE_INPUTS else None


def divisions(kind: LinearKind, bucket: int) -> list[LinearTiling]:
    """The chosen tiling, and other divisions of tiles.cu and wide.cu for a bucket of more than 8 tokens."""
    found: list[LinearTiling] = [choose_tiling(kind, bucket), *WideTiling.all_of(kind, bucket)]
    if bucket <= tiles.MAX_TOKENS:
        found += tiles.all_of(kind, bucket)
    return list(dict.fromkeys(found))


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positives, default="1,8")
    parser.add_argument("--linears", nargs="+", default=list(NEMOTRON_H))
    parser.add_argument("--rows", nargs="*", default=[], help="divisions of rows.cu besides the chosen one")
    parser.add_argument("--sweep", action="store_true", help="divisions of tiles.cu and wide.cu too")
    parser.add_argument("--library", action="store_true", help="torch's products too")
    options = parser.parse_args(arguments)
    need_hopper()
    torch.manual_seed(0)
    limit = read_rate()
    print(f"{machine_line()}, a sum reads {limit:.0f} GB/s")
    print(f"{'linear':32}{'tokens':>7}{'µs':>8}{'GB/s':>7}{'read':>6}{'error':>7}  division")
    linears = [Linear.parse(text) for text in options.linears]
    buckets: dict[int, list[int]] = {}
    for tokens in options.tokens:
        buckets.setdefault(bucket_of(tokens), []).append(tokens)
    with KernelCompiler() as compiler:
        of_all = [
            (bucket, counts, division, [tiling_of(linear.kind, bucket, division) for linear in linears])
            for bucket, counts in buckets.items()
            for division in (CHOSEN, *options.rows)
        ]
        compiler.start(tiling for *_, tilings in of_all for tiling in tilings if tiling is not None)
        for bucket, counts, division, tilings in of_all:
            others = [tiling or choose_tiling(one.kind, bucket) for one, tiling in zip(linears, tilings, strict=True)]
            try:
                load(compiler, others, STREAMED.load_kernels)
            except (DeviceError, CompileError) as reason:  # a division that cannot be launched hides no other
                print(f"{division}: {reason}")
                continue
            for tokens in counts:
                _measure(linears, tilings, tokens, division, limit)
                if division == CHOSEN and options.library:
                    _measure_library(linears, tokens)
                if division == CHOSEN and options.sweep and tokens > rows.MAX_TOKENS:
                    _sweep(compiler, linears, tokens)
    return 0


def _measure_library(linears: Sequence[Linear], tokens: int) -> None:
    for linear in linears:
        time = graph_us(lambda one=linear: [one.x @ weight.T for weight in one.weights]) / len(linear.weights)
        print(f"{linear.name:32}{tokens:7}{time:8.1f}{'':20}  by the library")


def _sweep(compiler: KernelCompiler, linears: Sequence[Linear], tokens: int) -> None:
    """Times each linear in each division, then all of them in the chosen and in the fastest ones, by turns."""
    bucket, chosen, fastest = bucket_of(tokens), [], []
    of_all = [divisions(linear.kind, bucket) for linear in linears]
    compiler.start(tiling for tilings in of_all for tiling in tilings)
    for linear, tilings in zip(linears, of_all, strict=True):
        found = []
        for tiling in tilings:
            try:
                load(compiler, [tiling], STREAMED.load_kernels)
                found.append((graph_us(linear.run) / len(linear.weights), tiling, linear.error()))
            except (DeviceError, CompileError) as reason:
                print(f"{'':32}{_division_of(tiling)}: {reason}")
        for time, tiling, error in sorted(found, key=lambda one: one[0]):
            mark = " (chosen)" if tiling == tilings[0] else ""
            print(f"{linear.name:32}{tokens:7}{time:8.1f}{'':13}{error:7.2f}  {_division_of(tiling)}{mark}")
        chosen.append(tilings[0])
        fastest.append(min(found, key=lambda one: one[0])[1])
    for name, tilings in (("chosen", chosen), ("fastest", fastest)) * 2:
        load(compiler, tilings, STREAMED.load_kernels)
        time = graph_us(lambda: _chain(linears)) / CHAINED_LAYERS
        print(f"{'all, one behind another':32}{tokens:7}{time:8.1f}{'':20}  {name}")
    load(compiler, chosen, STREAMED.load_kernels)


def _division_of(tiling: LinearTiling) -> str:
    names = [field.name for field in fields(tiling) if field.name not in ("kind", "tokens")]
    return ", ".join([Path(tiling.source).name, *(f"{name} {getattr(tiling, name)}" for name in names)])


def _chain(linears: Sequence[Linear]) -> None:
    for layer in range(CHAINED_LAYERS):
        for linear in linears:
            linear.run_one(linear.weights[layer])


def _measure(
    linears: Sequence[Linear], tilings: Sequence[LinearTiling | None], tokens: int, division: str, limit: float
) -> None:
    for linear, tiling in zip(linears, tilings, strict=True):
        linear.set_tokens(tokens)
        if tiling is None:
            continue
        time, error = graph_us(linear.run) / len(linear.weights), linear.error()
        rate = linear.weights[0].nbytes / time / 1e3
        line = f"{linear.name:32}{tokens:7}{time:8.1f}{rate:7.0f}{rate / limit:6.0%}{error:7.2f}"
        print(f"{line}  {_division_of(tiling)}")
    time = graph_us(lambda: _chain(linears)) / CHAINED_LAYERS
    rate = sum(linear.weights[0].nbytes for linear in linears) / time / 1e3
    print(f"{'all, one behind another':32}{tokens:7}{time:8.1f}{rate:7.0f}{rate / limit:6.0%}{'':9}{division}")


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main(sys.argv[1:]))
