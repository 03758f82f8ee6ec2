"""The instruction that multiplies 64 tokens by a tile of a weight, as C++: its operands are written out one by one."""

from __future__ import annotations

_INSTRUCTION = """
__device__ __forceinline__ void multiply_add_all(float* d, unsigned long long a, unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{sums}}}, %{a}, %{b}, 1, 1, 1, 0, 0;"
               : {outputs} : "l"(a), "l"(b));
}}
"""


def multiply_add_all(rows: int) -> str:
    """The function of that name, for a tile of `rows`: its sums are rows / 2 registers of each of 128 threads."""
    count = rows // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return _INSTRUCTION.format(rows=rows, sums=sums, outputs=outputs, a=count, b=count + 1)
