"""Kernels that let the next one begin and write its inputs 0.2 ms later: without a wait it reads older data."""

from __future__ import annotations

from mllm_compile.kernels.nvrtc import compile_cuda
from mllm_compile.runtime.cuda.driver import Kernel

# Few: where they are, no registers may be left for a block of the next kernel.
LATE_BLOCKS = 32


def late_source(parameters: str, writes: str) -> str:
    return f"""
extern "C" __global__ void write_late({parameters}) {{
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now < begin + 200000);
  {writes}
}}
"""


def late_kernel(parameters: str, writes: str) -> Kernel:
    """In CUDA C++: what it is given, and what it writes when the time has come. Launched with LATE_BLOCKS blocks."""
    return Kernel(compile_cuda(late_source(parameters, writes), "write_late", "sm_90a"), "write_late", 0)
