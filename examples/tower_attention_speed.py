"""Microseconds of the kernels of towers' attention on Hopper, in every division that a block can have, beside torch's.

    python examples/tower_attention_speed.py [--json FILE]

Needs an H100 or H200. A division whose result is further from float32 than torch's is said to be wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from mllm_compile.bench.limits.ceilings import measure_ceilings
from mllm_compile.kernels.nvrtc import compile_cuda
from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.driver import Kernel, TensorMap, address_of
from mllm_compile.runtime.cuda.source import kernel_source
from mllm_compile.runtime.cuda.tensor_maps import TensorMaps
from mllm_compile.runtime.ops.varlen.kernel import PANEL, TowerKernel

HEADS = 16
# (rows, head dim, rows that see each other)
SHAPES = ((4096, 72, 4096), (5476, 80, 5476), (5476, 80, 64), (4096, 64, 4096), (4096, 128, 4096))


@dataclass(frozen=True)
class Tried(TowerKernel):
    by_sums: int = 0
    overlaps: bool = True

    @property
    def name(self) -> str:
        return f"{super().name}_sums{self.by_sums}_overlaps{int(self.overlaps)}"

    def constants(self) -> dict[str, int]:
        return super().constants() | {"BY_SUMS": self.by_sums, "OVERLAPS": int(self.overlaps)}


class Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "tiles", "row")),
        ("scale", ctypes.c_float),
    )


MAPS = TensorMaps()


def launcher(kernel: TowerKernel, binary: bytes) -> Callable[..., object]:
    loaded = Kernel(binary, kernel.function, kernel.shared_bytes)

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, longest: int, out: torch.Tensor
    ) -> None:
        def of(x: torch.Tensor, rows: int, columns: int) -> TensorMap:
            return MAPS.get(x, tensor_maps.heads, rows, columns, x.shape[1], x.stride(0), x.stride(1))

        rest = kernel.rest_columns or PANEL
        count = (kernel.rows, kernel.keys, kernel.keys)
        maps = [of(x, rows, columns) for columns in (PANEL, rest) for x, rows in zip((q, k, v), count, strict=True)]
        tiles = -(-longest // kernel.rows)
        sizes = Sizes(q.shape[1], k.shape[1], tiles, out.stride(0), q.shape[2] ** -0.5 * 1.4426950408889634)
        blocks = tiles * q.shape[1] * (len(bounds) - 1)
        loaded.launch(blocks, kernel.num_threads, [*maps, address_of(out), address_of(bounds), sizes])

    return run


def tried(head_dim: int) -> list[Tried]:
    divisions = [(64, 64, 2), (64, 128, 2), (128, 128, 2), (128, 176, 2), (192, 96, 2), (192, 112, 2), (192, 128, 2)]
    if head_dim == 128:
        divisions = [(128, 128, 2), (128, 160, 2)]
    found = [
        Tried(head_dim, *division, turns, sums)
        for division in divisions
        for turns in (False, True)
        for sums in (0, 2)
        if division[0] > 64 or not turns
    ]
    if head_dim == 72:
        found += [
            Tried(72, 128, 128, 2, True, 0, False),
            Tried(72, 128, 128, 3, True, 2),
            Tried(72, 128, 176, 2, True, 3),
        ]
        found += [Tried(72, 128, 144, 2, True, 2), Tried(72, 192, 128, 2, True, 3), Tried(72, 192, 80, 3, True, 2)]
    return found


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    parts = []
    for start, end in itertools.pairwise(bounds):
        of_q, of_k, of_v = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        parts.append(functional.scaled_dot_product_attention(of_q, of_k, of_v)[0].transpose(0, 1))
    return torch.cat(parts)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


class Checks:
    """Cases of one head dim, and how far torch in bfloat16 is from float32 there."""

    def __init__(self, head_dim: int) -> None:
        torch.manual_seed(0)
        self.cases = []
        for lengths in ([700], [256, 1024, 64], [64] * 9 + [16, 48], [1, 1, 7, 300, 1]):
            count, ends = sum(lengths), [0, *itertools.accumulate(lengths)]
            packed = random(count, 3, 4, head_dim)
            q, k, v = packed.unbind(1)
            q = 3 * q.contiguous()
            exact = reference(q.float(), k.float(), v.float(), ends)
            theirs = (reference(q, k, v, ends).float() - exact).abs().mean().item()
            bounds = torch.tensor(ends, dtype=torch.int32, device="cuda")
            self.cases.append((q, k, v, bounds, max(lengths), exact, theirs))

    def worst(self, run: Callable[..., object]) -> float:
        """Our mean error over torch's, of the worst case."""
        worst = 0.0
        for q, k, v, bounds, longest, exact, theirs in self.cases:
            out = torch.full(q.shape, float("nan"), dtype=q.dtype, device="cuda")
            run(q, k, v, bounds, longest, out)
            wait_or_end("a kernel")
            error = (out.float() - exact).abs().mean().item()
            worst = max(worst, error / theirs) if error == error else float("inf")
        return worst


def wait_or_end(what: str) -> None:
    """Waits for the device; a kernel that does not end would hold it for ever, so the program ends instead."""
    done = torch.cuda.Event()
    done.record()
    start = time.perf_counter()
    while not done.query():
        if time.perf_counter() - start > 3:
            print(f"{what} does not end", flush=True)
            os._exit(1)
        time.sleep(1e-3)


def microseconds(run: Callable[..., object], *arguments: object) -> float:
    run(*arguments)
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            run(*arguments)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 100)
    return min(times)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]


def by_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, longest: int, out: torch.Tensor
) -> None:
    scale = q.shape[2] ** -0.5
    torch.ops.aten._flash_attention_forward(q, k, v, bounds, bounds, longest, longest, 0.0, False, False, scale=scale)


def by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        )


def inputs_of(count: int, head_dim: int, segment: int) -> Inputs:
    q, k, v, out = (random(count, HEADS, head_dim) for _ in range(4))
    bounds = torch.tensor([*range(0, count, segment), count], dtype=torch.int32, device="cuda")
    return q, k, v, bounds, segment, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs an NVIDIA GPU")
    rate = measure_ceilings(torch.device("cuda"), torch.bfloat16).flops_s
    print(f"a large product: {rate / 1e12:.0f} TFLOP/s on {torch.cuda.get_device_name()}", flush=True)
    kernels = [kernel for head_dim in (72, 80, 64, 128) for kernel in tried(head_dim)]
    kernels.sort(key=lambda kernel: kernel.takes_turns)

    def compiled(kernel: TowerKernel) -> bytes:
        return compile_cuda(kernel_source(kernel), kernel.name, "sm_90a")

    lines: list[dict[str, object]] = []

    def measure(shape: tuple[int, int, int], name: str, run: Callable[..., object], error: float) -> None:
        count, head_dim, segment = shape
        us = microseconds(run, *inputs[shape])
        share = 4 * count * segment * HEADS * head_dim / us * 1e6 / rate
        lines.append({"shape": shape, "kernel": name, "us": us, "share": share, "error": error})
        print(f"{shape!s:20} {name:65} {us:8.1f} us {share:6.1%} of the rate, error {error:.2f}", flush=True)

    torch.ones(1, device="cuda")
    with ThreadPoolExecutor(16) as threads:
        binaries = {kernel: threads.submit(compiled, kernel) for kernel in kernels}
        checks = {head_dim: Checks(head_dim) for head_dim in (72, 80, 64, 128)}
        inputs = {shape: inputs_of(*shape) for shape in SHAPES}
        for shape in SHAPES:
            measure(shape, "torch's flash", by_flash, 1.0)
            if shape[0] == shape[2]:
                measure(shape, "cudnn", by_cudnn, 1.0)
        for kernel in kernels:
            run = launcher(kernel, binaries[kernel].result())
            print(kernel.name, end="\r", flush=True)
            error = checks[kernel.head_dim].worst(run)
            for shape in SHAPES:
                if shape[1] == kernel.head_dim and (shape[2] > 64 or kernel.rows == 64):
                    measure(shape, kernel.name, run, error)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(lines, file, indent=1)


if __name__ == "__main__":
    main()
