"""A kernel that only reads: the measured ceiling of memory-bound work. Imported on CUDA machines alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

_BLOCK = 8192  # elements a program reads at a time: 32 KiB in flight
_PROGRAMS_PER_SM = 8


@triton.jit
def _read(data: tl.tensor, out: tl.tensor, num_blocks: tl.tensor, BLOCK: tl.constexpr) -> None:
    """XORs blocks of `data`, each program a strided share; the result is kept, so that no read can be dropped."""
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        total ^= tl.load(data + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.xor_sum(total, axis=0))


def triton_reader(data: torch.Tensor) -> Callable[[], object]:
    """A function that reads `data` (int32, contiguous, a multiple of 8192 elements and less than 2³¹) once."""
    programs = torch.cuda.get_device_properties(data.device).multi_processor_count * _PROGRAMS_PER_SM
    out = torch.empty(programs, dtype=torch.int32, device=data.device)
    num_blocks = data.numel() // _BLOCK
    return lambda: _read[(programs,)](data, out, num_blocks, BLOCK=_BLOCK, num_warps=8)
