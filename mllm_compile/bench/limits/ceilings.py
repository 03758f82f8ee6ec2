"""Measures what the device reaches: bytes read a second from memory, floating-point operations a second in a GEMM."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from mllm_compile.bench.measure.results import Ceilings
from mllm_compile.bench.timing.clock import gpu_seconds, wall_seconds
from mllm_compile.bench.timing.rounds import repeated

# Far beyond any cache, and long enough that starting the kernel does not count.
_READ_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
_GEMM_SIZE = {"cuda": 8192, "cpu": 1024}
_REPEATS = {"cuda": 20, "cpu": 3}


def measure_ceilings(device: torch.device, dtype: torch.dtype, in_fp8: bool = False) -> Ceilings:
    """
    Args:
        device: a CUDA device (then the current one) or the CPU with torch's number of threads.
        dtype: the GEMM's.
        in_fp8: measure one of fp8 too, with a scale a row of either operand; for a Hopper GPU.
    """
    num_bytes, size = _READ_BYTES[device.type], _GEMM_SIZE[device.type]
    read_s = _best_seconds(_reader(torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)), device)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    gemm_s = _best_seconds(lambda: torch.mm(a, b), device)
    fp8_s = _best_seconds(_product_in_fp8(size, device), device) if in_fp8 else None
    flops = 2 * size**3
    return Ceilings(
        read_bytes_s=num_bytes / read_s,
        flops_s=flops / gemm_s,
        fp8_flops_s=None if fp8_s is None else flops / fp8_s,
    )


def _product_in_fp8(size: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scales = torch.ones(size, 1, device=device)
    return lambda: torch._scaled_mm(a, b.t(), scales, scales.t(), out_dtype=torch.bfloat16, use_fast_accum=True)


def _reader(data: torch.Tensor) -> Callable[[], object]:
    """A function that reads `data` once as fast as can be."""
    if data.is_cuda:
        from mllm_compile.bench.limits.triton_read import triton_reader

        return triton_reader(data)
    # amax touches every element once and keeps nothing; torch's sum of int32 widens first.
    floats = data.view(torch.float32)
    return lambda: torch.amax(floats)


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median on a GPU; the best on a CPU, which other processes share."""
    if device.type == "cuda":
        return statistics.median(repeated(lambda: gpu_seconds(run), _REPEATS["cuda"]))
    return min(repeated(lambda: wall_seconds(run), _REPEATS["cpu"]))
