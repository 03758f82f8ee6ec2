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
from collections.abc import Callable, Iterator
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
from mllm_compile.runtime.cuda.wgmma import multiply_registers
from mllm_compile.runtime.ops.varlen.kernel import PANEL, SegmentsKernel

HEADS = 16
# (rows, head dim, rows that see each other)
SHAPES = ((4096, 72, 4096), (5476, 80, 5476), (5476, 80, 64), (4096, 64, 4096), (4096, 128, 4096))


@dataclass(frozen=True)
class Tried(SegmentsKernel):
    """A division with other constants of the source than the program's."""

    others: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return super().name + "".join(f" {name.lower()} {value}" for name, value in self.others)

    def constants(self) -> dict[str, int]:
        return super().constants() | dict(self.others)

    def preamble(self) -> str:
        return super().preamble() + multiply_registers(self.head_dim, "weigh_all", transposed=True)


class Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "tiles", "row")),
        ("scale", ctypes.c_float),
    )


MAPS = TensorMaps()


def launcher(kernel: SegmentsKernel, binary: bytes) -> Callable[..., object]:
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


NARROW, FREE, SKIPS = ("NARROW_VALUES", 1), ("OVERLAPS", 0), ("SKIPS", 1)


def tried(head_dim: int) -> Iterator[Tried]:
    if head_dim == 128:
        for turns in (False, True):
            yield Tried(128, 128, 128, 2, turns)
            yield Tried(128, 128, 128, 2, turns, (FREE,))
            yield Tried(128, 128, 144, 2, turns, (FREE,))
        yield Tried(128, 192, 80, 2, False, (FREE,))
        yield Tried(128, 192, 80, 2, False)
        return
    divisions = [(128, 128), (128, 176), (192, 96), (192, 112), (192, 128), (256, 64)]
    for rows, keys in divisions:
        yield Tried(head_dim, rows, keys, 2, False)
        yield Tried(head_dim, rows, keys, 2, False, (FREE,))
        yield Tried(head_dim, rows, keys, 2, True, (FREE,))
        if head_dim > 64:
            yield Tried(head_dim, rows, keys, 2, False, (NARROW,))
            yield Tried(head_dim, rows, keys, 2, False, (FREE, SKIPS))
    if head_dim == 72:
        for turns in (False, True):
            yield Tried(72, 128, 128, 3, turns, (FREE,))
            yield Tried(72, 128, 128, 2, turns, (FREE, NARROW))
            yield Tried(72, 192, 112, 2, turns, (FREE, NARROW))
            for trial in (1, 2):
                yield Tried(72, 128, 128, 2, turns, (("TRIAL", trial),))
                yield Tried(72, 128, 128, 2, turns, (("TRIAL", trial), NARROW))
                yield Tried(72, 192, 128, 2, turns, (("TRIAL", trial),))
        yield Tried(72, 128, 48, 3, False, (FREE, ("BLOCKS", 2), ("REGISTERS", 104)))


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
    kernels += [Tried(80, 64, 64, stages, False) for stages in (1, 2)]

    def compiled(kernel: SegmentsKernel) -> bytes:
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
