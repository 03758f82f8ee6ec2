"""wgmma as C++, 64 rows by a tile's columns: its operands are written out one by one."""

from __future__ import annotations

_INSTRUCTION = """
__device__ __forceinline__ void multiply_add_all(float* d, unsigned long long a, unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{sums}}}, %{a}, %{b}, 1, 1, 1, 0, 0;"
               : {outputs} : "l"(a), "l"(b));
}}
"""


def multiply_add_all(columns: int) -> str:
    """The function of that name, for so many columns: its sums are columns / 2 registers of each of 128 threads."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return _INSTRUCTION.format(columns=columns, sums=sums, outputs=outputs, a=count, b=count + 1)
