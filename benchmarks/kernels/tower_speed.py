"""Microseconds of the attention and products of a tower of images, at the sizes of Qwen2.5-VL and Qwen3-VL.

The image has 1024 × 1024 pixels. Attention is by kernels of ours and of torch, products with inner sizes that kernels
like or not.

    python -m benchmarks.kernels.tower_speed

Needs an NVIDIA GPU. The last column is the share of a large product's rate, by the operations that the work needs:
zeros that heads or features are padded with count as none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.script import need_gpu, parser_of
from mllm_compile.bench.limits.ceilings import measure_ceilings
from mllm_compile.bench.timing.clock import gpu_seconds
from mllm_compile.bench.timing.rounds import repeated
from mllm_compile.kernels.cuda import can_compile_kernels
from mllm_compile.kernels.nvrtc import compile_cuda
from mllm_compile.process.console import print_table
from mllm_compile.runtime.cuda.kernel import kernel_source
from mllm_compile.runtime.ops.segments.kernel import SegmentsKernel, segments_kernels
from mllm_compile.runtime.ops.segments.ops import load_segments_kernels, loaded_kernel

HEADS = 16
# (patches, head dim, patches that see each other)
ATTENTION = ((4096, 72, 4096), (5476, 80, 5476), (5476, 80, 64))
# (rows, inner size, columns, inner size with zeros)
PRODUCTS = (
    *((5476, 3420, 1280, padded) for padded in (3420, 3424, 3456)),
    (5476, 1280, 6840, 1280),
    (4096, 4304, 1152, 4304),
    (4096, 1152, 4304, 1152),
)
LAUNCHES, REPEATS = 10, 5


def main() -> None:
    parser_of(__doc__).parse_args()
    need_gpu()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    rate = measure_ceilings(torch.device("cuda"), torch.bfloat16).flops_s
    rows = []
    for patches, head_dim, segment in ATTENTION:
        flops = 4 * patches * segment * HEADS * head_dim
        for name, run in attention(patches, head_dim, segment).items():
            rows.append((f"attention {patches} x {HEADS} x {head_dim}, of {segment}", name, *figures(run, flops, rate)))
    for count, inner, columns, padded in PRODUCTS:
        x, weight = random(count, padded), random(columns, padded)
        cells = figures(partial(functional.linear, x, weight), 2 * count * inner * columns, rate)
        rows.append((f"product {count} x {inner} x {columns}", f"inner size {padded}", *cells))
    images, kernel = random(4096, 3, 2, 16, 16), random(1152, 3, 2, 16, 16)
    ways: dict[str, Callable[[], object]] = {
        "convolution": lambda: torch.conv3d(images, kernel, None, (2, 16, 16)),
        "product": lambda: functional.linear(images.flatten(1), kernel.flatten(1)),
    }
    rows += [
        ("patches 4096 x 1536 x 1152", name, *figures(run, 2 * 4096 * 1536 * 1152, rate)) for name, run in ways.items()
    ]
    print_table(sys.stdout, f"a large product: {rate / 1e12:.0f} TFLOP/s", ("work", "by", "µs", "share"), rows)


def attention(patches: int, head_dim: int, segment: int) -> dict[str, Callable[[], object]]:
    """Ways to attend within segments; q, k and v [patches, heads, head_dim]."""
    ends = [*range(0, patches, segment), patches]
    bounds = torch.tensor(ends, dtype=torch.int32, device="cuda")
    scale = head_dim**-0.5

    def flash(width: int) -> Callable[[], object]:
        q, k, v = (functional.pad(random(patches, HEADS, head_dim), (0, width - head_dim)) for _ in range(3))
        return lambda: torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, segment, segment, 0.0, False, False, scale=scale
        )

    def dense(backend: SDPBackend) -> Callable[[], object]:
        q, k, v = (random(patches, HEADS, head_dim).transpose(0, 1)[None] for _ in range(3))

        def run() -> None:
            with sdpa_kernel(backend):
                functional.scaled_dot_product_attention(q, k, v, scale=scale)

        return run

    ways = {f"flash, {width} wide": flash(width) for width in (head_dim, 96, 128)}
    if can_compile_kernels("cuda:0"):
        q, k, v, out = (random(patches, HEADS, head_dim) for _ in range(4))
        for kernel, run in ours(head_dim).items():
            ways[kernel.name] = partial(run, q, k, v, bounds, out, scale, segment)
    if segment == patches:
        ways |= {name: dense(getattr(SDPBackend, name)) for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION")}
    return ways


def ours(head_dim: int) -> dict[SegmentsKernel, Callable[..., None]]:
    kernels, device = segments_kernels(head_dim), torch.device("cuda:0")
    binaries = {kernel.name: compile_cuda(kernel_source(kernel), kernel.name, "sm_90a") for kernel in kernels}
    load_segments_kernels(kernels, binaries, device)
    return {kernel: loaded_kernel(kernel, device) for kernel in kernels}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def figures(run: Callable[[], object], flops: float, rate: float) -> tuple[str, str]:
    """Microseconds, and the share of the rate; a way that the GPU does not have says so."""
    try:
        run()
    except RuntimeError as error:
        return str(error).splitlines()[0][:60], ""

    def launches() -> None:
        for _ in range(LAUNCHES):
            run()

    us = min(repeated(lambda: gpu_seconds(launches), REPEATS, warm_ups=0)) * 1e6 / LAUNCHES
    return f"{us:.0f}", f"{flops / (us * 1e-6) / rate:.0%}"


if __name__ == "__main__":
    main()
