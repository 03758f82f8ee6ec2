"""Microseconds that adapters add to linears of up to 64 tokens, within the linears' own kernels.

    python -m benchmarks.kernels.adapted_linears_speed [--tokens 1,8,16,64] [--rank 16]

Needs a Hopper GPU. It takes the linears of Qwen3-8B's layers, with the norms, activations and residuals of a decode.
Columns are one adapter for all tokens, and for each token its own. A CUDA graph runs a linear with one weight after
another, and their adapters, so that they come from the GPU's memory. The last line runs all linears one behind
another, as layers do. An error is the worst token's distance from float32 over torch's in bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from benchmarks.kernels.quantised_linears_speed import EPS, load, off_by
from benchmarks.script import need_hopper, parser_of, positives, told_in_one_line
from mllm_compile.bench.timing.graph import graph_us
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.ops.stream_linear.adapted import AdaptedKind, choose
from mllm_compile.runtime.ops.stream_linear.adapted_ops import STREAMED as ADAPTED
from mllm_compile.runtime.ops.stream_linear.linear import bucket_of
from mllm_compile.runtime.ops.stream_linear.ops import STREAMED
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling

LAYERS, SLOTS = 12, 8
PLAIN, ONE, OWN = "plain", "one", "own"


class Shape(NamedTuple):
    name: str
    rows: int
    columns: int
    parts: tuple[int, ...]  # outputs of each
    form: str

    @property
    def starts(self) -> list[int]:
        return [sum(self.parts[:index]) for index in range(len(self.parts))]

    def kind(self, rank: int) -> AdaptedKind:
        has_residual, blocks = self.form == "residual", self.rows // 16
        return AdaptedKind(
            self.rows,
            self.columns,
            0 if has_residual else self.columns // 16,
            gated=self.form == "gated",
            residual=has_residual,
            next_blocks=blocks if has_residual else 0,
            rank=rank,
            parts=tuple(zip(self.starts, self.parts, strict=True)),
        )


SHAPES = (
    Shape("o", 4096, 4096, (4096,), "residual"),
    Shape("gate_up", 24576, 4096, (12288, 12288), "gated"),
    Shape("down", 4096, 12288, (4096,), "residual"),
    Shape("qkv", 6144, 4096, (4096, 1024, 1024), "norm"),
)


class Linear:
    """One linear with its weights and adapters of some layers, for some tokens."""

    def __init__(self, shape: Shape, rank: int, tokens: int) -> None:
        def random(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*sizes, device="cuda") * scale).bfloat16()

        n, k = shape.rows, shape.columns
        self.shape, self.kind = shape, shape.kind(rank)
        self.weights = [random(n, k, scale=0.02) for _ in range(LAYERS)]
        self.a = [random(SLOTS, rank * len(shape.parts), k, scale=0.02) for _ in range(LAYERS)]
        self.b = [random(SLOTS, n, rank, scale=0.1) for _ in range(LAYERS)]
        self.x, self.residual = random(tokens, k), random(tokens, n)
        self.next_norm = random(n, scale=0.1) + 1
        self.squares = self.x.float().pow(2).unflatten(-1, (-1, 16)).sum(-1)

    def run(self, layer: int, slots: torch.Tensor | None) -> torch.Tensor:
        ops, weight = torch.ops.mllm, self.weights[layer]
        adapters = (
            () if slots is None else (self.a[layer], self.b[layer], slots, self.shape.starts, self.shape.parts, True)
        )
        if self.kind.residual:
            op = ops.stream_linear_residual_norm if slots is None else ops.stream_linear_lora_residual_norm
            out: torch.Tensor = op(self.x, weight, *adapters, self.residual, self.next_norm)[0]
        else:
            op = ops.stream_linear if slots is None else ops.stream_linear_lora
            out = op(self.x, weight, *adapters, self.squares, EPS, self.kind.gated)
        return out

    def error(self, slots: torch.Tensor) -> float:
        exact = self._computed(torch.float32, slots)
        return off_by(self.run(0, slots), exact) / off_by(self._computed(torch.bfloat16, slots), exact)

    def _computed(self, dtype: torch.dtype, slots: torch.Tensor) -> torch.Tensor:
        x, a, b = (tensor.to(dtype) for tensor in (self.x, self.a[0], self.b[0]))
        factor = torch.rsqrt(self.squares.sum(-1, keepdim=True) / self.shape.columns + EPS)
        if not self.kind.residual:
            x = (x.float() * factor).to(dtype)
        out = torch_linear(x, self.weights[0].to(dtype))
        for token, slot in enumerate(slots.tolist()):
            shrunk = (a[slot] @ x[token]).unflatten(0, (-1, self.kind.rank))
            for part, (start, count) in enumerate(self.kind.parts):
                if slot >= 0:
                    out[token, start : start + count] += b[slot, start : start + count] @ shrunk[part]
        if self.kind.gated:
            gate, up = out.chunk(2, -1)
            out = silu(gate) * up
        return self.residual.to(dtype) + out if self.kind.residual else out


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positives, default="1,8,16,64")
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args(arguments)
    need_hopper()
    torch.manual_seed(0)
    print(machine_line())
    with KernelCompiler() as compiler:
        kinds = [shape.kind(options.rank) for shape in SHAPES]
        cases = [(kind, bucket) for kind in kinds for bucket in dict.fromkeys(map(bucket_of, options.tokens))]
        adapted, plain = [choose(*one) for one in cases], [choose_tiling(kind.plain, bucket) for kind, bucket in cases]
        compiler.start([*adapted, *plain])
        load(compiler, adapted, ADAPTED.load_kernels)
        load(compiler, plain, STREAMED.load_kernels)
    print(f"{'linear':10}{'tokens':>7}{'plain':>8}{'one':>8}{'own':>8}  µs, and errors of the last two")
    for tokens in options.tokens:
        _measure([Linear(shape, options.rank, tokens) for shape in SHAPES], tokens)
    return 0


def _measure(linears: Sequence[Linear], tokens: int) -> None:
    slots_of: dict[str, torch.Tensor | None] = {
        PLAIN: None,
        ONE: torch.full((tokens,), 3, dtype=torch.int32, device="cuda"),
        OWN: torch.arange(tokens, dtype=torch.int32, device="cuda") % SLOTS,
    }

    def layers(some: Sequence[Linear], slots: torch.Tensor | None) -> Callable[[], None]:
        return lambda: [one.run(layer, slots) for layer in range(LAYERS) for one in some] and None

    for some, name in (*(([one], one.shape.name) for one in linears), (linears, "all")):
        times = [graph_us(layers(some, slots)) / LAYERS for slots in slots_of.values()]
        errors = [some[0].error(slots) for slots in slots_of.values() if slots is not None] if len(some) == 1 else []
        line = "".join(f"{time:8.2f}" for time in times) + "".join(f"{error:7.2f}" for error in errors)
        print(f"{name:10}{tokens:7}{line}")


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main(sys.argv[1:]))
