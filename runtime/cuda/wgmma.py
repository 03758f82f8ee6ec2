"""wgmma as C++, 64 rows by a tile's columns: its operands are written out one by one."""

from __future__ import annotations

_INSTRUCTION = """
__device__ __forceinline__ void multiply_add_all(float* d, unsigned long long a, unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}{form} {{{sums}}}, %{a}, %{b}, 1, 1, 1{order};"
               : {outputs} : "l"(a), "l"(b));
}}
"""

_FROM_MEMORY = """
__device__ __forceinline__ void {name}(float* d, unsigned long long a, unsigned long long b, bool add) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{add}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{sums}}}, %{a}, %{b}, p, 1, 1, 0, 0; }}"
               : {outputs} : "l"(a), "l"(b), "r"((int)add));
}}
"""

_FROM_REGISTERS = """
__device__ __forceinline__ void {name}(float* d, const unsigned (&a)[4], unsigned long long b, bool add) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{add}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{sums}}}, {{{values}}},"
               " %{b}, p, 1, 1, {transposed}; }}"
               : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}}
"""


def multiply_add_all(columns: int, *, in_fp8: bool = False) -> str:
    """The function of that name, for so many columns: its sums are columns / 2 registers of each of 128 threads. Both
    operands are of 32 bytes a row and column: 16 values of bfloat16, or 32 of e4m3."""
    count = columns // 2
    form = "k32.f32.e4m3.e4m3" if in_fp8 else "k16.f32.bf16.bf16"
    order = "" if in_fp8 else ", 0, 0"  # in two bytes neighbours could be of one column
    return _INSTRUCTION.format(**_sums(columns), form=form, order=order, a=count, b=count + 1)


def multiply(columns: int, name: str) -> str:
    """A function as multiply_add_all; without `add` the sums begin at zero."""
    count = columns // 2
    return _FROM_MEMORY.format(**_sums(columns), name=name, a=count, b=count + 1, add=count + 2)


def multiply_registers(columns: int, name: str = "multiply_registers", *, transposed: bool = False) -> str:
    """The function `name`: the 64 rows are registers, a warp's 16 as m16n8k16 has them; without `add` the sums begin at
    zero. Transposed: neighbours in memory are of one row of the 16, not of one column."""
    count = columns // 2
    values = ", ".join(f"%{count + i}" for i in range(4))
    return _FROM_REGISTERS.format(
        **_sums(columns), name=name, values=values, b=count + 4, add=count + 5, transposed=int(transposed)
    )


def _sums(columns: int) -> dict[str, object]:
    sums = ", ".join(f"%{i}" for i in range(columns // 2))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(columns // 2))
    return {"columns": columns, "sums": sums, "outputs": outputs}
