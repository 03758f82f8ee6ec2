"""Microseconds of one layer's linears as a rank of several has them, by the way in which each of them is divided.

    python -m benchmarks.kernels.rank_linears_speed [--ranks 2] [--shape 8b] [--tokens 8,64,128,256] [--best 4]
    python -m benchmarks.kernels.rank_linears_speed --sums [--tokens 1,8,64,256]           # a GPU for each rank

Needs a Hopper GPU. A CUDA graph runs the linears of many layers with their own weights, so that weights come from the
GPU's memory. They are qkv, o, residual and norm, gate_up with its activation, down, residual and norm: a rank's work
between two attentions, without sums over ranks. First all linears are divided as they are chosen; then one of them at a
time in every other way that is possible, or computed by cuBLAS (gate_up by gated.cu). A line has what a layer takes
less than with the chosen way; at the end all of the fastest ways are taken at once. An output that is off from torch's
is said.

With --sums all linears have the chosen division. A line has a layer's time with its two sums over ranks, by kernels of
ours and by NCCL, and without them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import linear, silu

from benchmarks.binaries import binaries_of
from benchmarks.script import need_hopper, parser_of, positive, positives
from mllm_compile.bench.timing.graph import graph_us, replay_us
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.errors import CompileError, DeviceError
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.collectives.nccl import NcclCommunicator, new_group_id
from mllm_compile.runtime.collectives.push import add_and_norm, load_ranks_kernel
from mllm_compile.runtime.collectives.sum_kernels import PushKernel, PushNormKernel, SendKernel, SendNormKernel
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops.gated_linear.kernel import gated_kernels
from mllm_compile.runtime.ops.gated_linear.ops import load_gated_kernels
from mllm_compile.runtime.ops.stream_linear import ops as streamed
from mllm_compile.runtime.ops.stream_linear import rows, tiles, wide
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind, LinearTiling, bucket_of
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling, is_streamed

# hidden, heads, features between gate_up and down, rows of qkv; of one rank
SHAPES = {
    "8b": (4096, 4096, 12288, 6144),
    "4b": (2560, 4096, 9728, 6144),
    "32b": (5120, 8192, 25600, 10240),
    "72b": (8192, 8192, 29568, 10240),
}
LINEARS = ("qkv", "o", "gate_up", "down")
EPS = 1e-6
LEAST_BYTES = 3 << 29  # of a chain's weights: many times the L2 cache
MOST_OFF = 0.01  # relative, of outputs that are rounded to bfloat16
RANK = int(os.environ.get("RANK", "0"))
DEVICE = torch.device("cuda", RANK)

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


class Layers:
    """The linears of several layers of a rank."""

    def __init__(self, shape: str, ranks: int) -> None:
        hidden, heads, ffn, qkv = SHAPES[shape]
        heads, ffn, qkv = heads // ranks, ffn // ranks, qkv // ranks
        self.sizes = {"qkv": (qkv, hidden), "o": (hidden, heads), "gate_up": (2 * ffn, hidden), "down": (hidden, ffn)}
        self.bytes_of_layer = 2 * sum(rows * columns for rows, columns in self.sizes.values())
        self.weights = [
            {name: (torch.randn(size, device=DEVICE) * 0.02).bfloat16() for name, size in self.sizes.items()}
            for _ in range(max(4, LEAST_BYTES // self.bytes_of_layer))
        ]
        self.norm = torch.rand(hidden, device=DEVICE).bfloat16() + 0.5
        self.by_library: frozenset[str] = frozenset()
        self.sum_and_norm: Sum = add_and_norm

    def kinds(self) -> dict[str, LinearKind]:
        return {name: LinearKind(*size, gated=name == "gate_up") for name, size in self.sizes.items()}

    def set_tokens(self, tokens: int) -> None:
        self.x = torch.randn(tokens, self.sizes["qkv"][1], device=DEVICE).bfloat16()
        self.attended = torch.randn(tokens, self.sizes["o"][1], device=DEVICE).bfloat16()

    def run_one(self, name: str, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if name not in self.by_library:
            return torch.ops.mllm.stream_linear(x, weight, None, 0.0, name == "gate_up")
        return torch.ops.mllm.gated_linear(x, weight) if name == "gate_up" else linear(x, weight)

    def run(self) -> None:
        h = scaled = self.x
        for weights in self.weights:
            self.run_one("qkv", weights["qkv"], scaled)
            h, scaled = self.sum_and_norm(self.run_one("o", weights["o"], self.attended), h, self.norm, EPS)
            active = self.run_one("gate_up", weights["gate_up"], scaled)
            h, scaled = self.sum_and_norm(self.run_one("down", weights["down"], active), h, self.norm, EPS)

    def error(self, name: str) -> float:
        """The distance of one linear's outputs from torch's."""
        weight = self.weights[0][name]
        x = self.attended if name == "o" else torch.randn(len(self.x), weight.shape[1], device=DEVICE).bfloat16()
        true = linear(x.float(), weight.float())
        if name == "gate_up":
            gates, ups = true.chunk(2, -1)
            true = silu(gates) * ups
        return float((self.run_one(name, weight, x).float() - true).norm() / true.norm())


def ways(kind: LinearKind, tokens: int) -> Iterator[LinearTiling]:
    """The ways to divide a linear, the chosen one among them or not."""
    if tokens <= rows.MAX_TOKENS:
        yield from _ways_by_rows(kind)
    if tokens <= tiles.MAX_TOKENS:
        yield from _ways_by_tiles(kind, tokens)
    if tokens > 64:
        yield from wide.WideTiling.all_of(kind, tokens)


def _ways_by_rows(kind: LinearKind) -> Iterator[LinearTiling]:
    for split, clusters, warps, resident in (
        (2, 132, 8, 2),
        (4, 66, 8, 2),
        (2, 66, 16, 1),
        (4, 33, 16, 1),
        (2, 66, 8, 1),
    ):
        if kind.columns % (32 * split):
            continue
        for pieces in range(1, 9):
            columns = kind.columns // split
            piece = -(-columns // pieces // (32 * warps)) * 32 * warps
            if piece * (pieces - 1) >= columns or not 512 <= piece <= 2048:
                continue
            fitting = [
                tiling
                for stages in range(2, 9)
                if (tiling := rows.RowTiling(kind, 8, split, clusters, warps, resident, piece, stages)).shared_bytes
                <= (228 << 10) // resident - 1024
                and (stages == 2 or stages <= pieces * tiling.groups)
            ]
            yield from fitting[-1:]


def _ways_by_tiles(kind: LinearKind, tokens: int) -> Iterator[LinearTiling]:
    for split, clusters in ((1, 132), (2, 66), (2, 64), (4, 32), (4, 29)):
        tile_rows = 16 * -(-kind.rows // (clusters * 16))
        if tile_rows > 256 or kind.columns // 64 % split:
            continue
        for panels in (1, 2, 4):
            steps, left = divmod(kind.columns // 64 // split, panels)
            fitting = [
                tiling
                for stages in range(1 if steps == 1 else 2, min(steps, 32) + 1)
                if (tiling := tiles.TileTiling(kind, tokens, tile_rows, split, panels, stages)).shared_bytes
                <= 227 << 10
            ]
            if not left:
                yield from fitting[-1:]


def shown(tiling: CudaKernel) -> str:
    fields = {name: value for name, value in tiling.to_json().items() if name not in ("source", "kind", "tokens")}
    source = tiling.source.rpartition("/")[2]
    return f"{source} {' '.join(f'{name} {value}' for name, value in fields.items())}"


class Kernels:
    """Compiles ways, all at once, and loads one of them."""

    def __init__(self, compiler: KernelCompiler) -> None:
        self._compiler = compiler

    def start(self, kernels: Sequence[CudaKernel]) -> None:
        self._compiler.start(kernels)

    def load(self, kernels: Sequence[Any], load: Callable[..., None]) -> None:
        load(kernels, binaries_of(self._compiler, kernels), DEVICE)


def compare(layers: Layers, kernels: Kernels, tokens: int, best: int) -> None:
    """Prints what a layer takes, and the fastest other ways for each linear."""
    bucket = bucket_of(tokens)
    layers.set_tokens(tokens)
    chosen = chosen_ways(layers, tokens)
    others = {name: list(dict.fromkeys(ways(kind, bucket))) for name, kind in layers.kinds().items()}
    kernels.start([one for every in others.values() for one in every])

    def use(name: str, tiling: LinearTiling | None) -> None:
        layers.by_library -= {name}
        if tiling is None:
            layers.by_library |= {name}
        else:
            kernels.load([tiling], streamed.STREAMED.load_kernels)

    for name, tiling in chosen.items():
        use(name, tiling)
    fastest: dict[str, LinearTiling | None] = {}
    fastest_kernels: dict[str, LinearTiling | None] = {}
    count = len(layers.weights)
    whole = graph_us(layers.run) / count
    print(f"{tokens} tokens: {whole:.1f} a layer, {layers.bytes_of_layer / whole / 1e3:.0f} GB/s")
    for name, tiling in chosen.items():
        found = []
        for other in (None, *others[name]):
            if other == tiling:
                continue
            try:
                use(name, other)
                wrong = layers.error(name)
                found.append((whole - graph_us(layers.run) / count, other, wrong))
            except (DeviceError, CompileError) as error:  # a way that cannot be launched hides no other
                print(f"  {name}: {error}"[:160])
        use(name, tiling)
        print(f"  {name:8} chosen: {'library' if tiling is None else shown(tiling)}")
        found.sort(key=lambda one: -one[0])
        for gain, other, wrong in found[:best]:
            mark = f"  WRONG by {wrong:.3g}" if not wrong < MOST_OFF else ""
            print(f"  {gain:+8.2f}  {'library' if other is None else shown(other)}{mark}")
        every = [(gain, other) for gain, other, wrong in found if wrong < MOST_OFF] + [(0.0, tiling)]
        fastest[name] = max(every, key=lambda one: one[0])[1]
        by_kernels = [one for one in every if one[1] is not None]
        fastest_kernels[name] = max(by_kernels, key=lambda one: one[0])[1]
    together = []
    for choice in (chosen, fastest, fastest_kernels):
        for name, tiling in choice.items():
            use(name, tiling)
        together.append(f"{graph_us(layers.run) / count:.1f}")
    print(
        f"  chosen again: {together[0]}; the fastest of each: {together[1]}; of kernels of ours: {together[2]}",
    )


def compare_sums(layers: Layers, kernels: Kernels, tokens: int, group: NcclCommunicator) -> None:
    """Prints what a layer takes with its sums."""
    pushed: Any = group._pushed

    def by_nccl(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group._pushed = None
        total = group.all_reduce(x)
        group._pushed = pushed
        return add_and_norm(total, residual, weight, eps)

    layers.set_tokens(tokens)
    for name, tiling in chosen_ways(layers, tokens).items():
        layers.by_library -= {name}
        if tiling is None:
            layers.by_library |= {name}
        else:
            kernels.load([tiling], streamed.STREAMED.load_kernels)
    line = f"{tokens:5} tokens:"
    for name, sums in (("none", add_and_norm), ("pushed", pushed.sum_and_norm), ("NCCL", by_nccl)):
        layers.sum_and_norm = sums
        taken = statistics.median(replay_us(layers.run, meet=lambda: group.least(0))) / len(layers.weights)
        line += f"  {name} {taken:.1f}"
    if group.rank == 0:
        print(line)


def chosen_ways(layers: Layers, tokens: int) -> dict[str, LinearTiling | None]:
    """How each linear is divided; None: it is computed by a library, or gated.cu."""
    return {
        name: choose_tiling(kind, bucket_of(tokens)) if is_streamed(kind.rows, kind.columns, tokens) else None
        for name, kind in layers.kinds().items()
    }


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", type=positives, default="8,64,128,256")
    parser.add_argument("--best", type=positive, default=4, help="ways that are shown of each linear")
    parser.add_argument("--sums", action="store_true", help="with sums over ranks, each of which has a GPU")
    options = parser.parse_args(arguments)
    need_hopper(options.ranks if options.sums else 1)
    if not options.sums:
        measure(options, None)
    elif RANK:
        measure(options, bytes.fromhex(os.environ["GROUP"]))
    else:
        group_id = new_group_id()
        others = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.kernels.rank_linears_speed", *arguments],
                env=os.environ | {"RANK": str(other), "GROUP": group_id.hex()},
            )
            for other in range(1, options.ranks)
        ]
        try:
            measure(options, group_id)
        finally:
            for other in others:
                other.wait(10)
    return 0


def measure(options: argparse.Namespace, group_id: bytes | None) -> None:
    torch.cuda.set_device(DEVICE)
    torch.manual_seed(0)
    layers = Layers(options.shape, options.ranks)
    if RANK == 0:
        print(f"{machine_line()}, {options.shape} on {options.ranks}, µs")
    with KernelCompiler() as compiler, torch.inference_mode():
        kernels = Kernels(compiler)
        columns = layers.sizes["o"][0]
        of_ranks = (PushKernel(), SendKernel(), PushNormKernel(columns), SendNormKernel(columns))
        for kernel in of_ranks:
            kernels.load([kernel], lambda one, binaries, device: load_ranks_kernel(one[0], binaries, device))
        kernels.load(gated_kernels(*layers.sizes["gate_up"]), load_gated_kernels)
        group = None if group_id is None else NcclCommunicator(RANK, options.ranks, group_id, DEVICE)
        if group is not None:
            group.use_kernels(of_ranks)
        for tokens in options.tokens:
            if group is None:
                compare(layers, kernels, tokens, options.best)
            else:
                compare_sums(layers, kernels, tokens, group)
        if group is not None:
            group.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
