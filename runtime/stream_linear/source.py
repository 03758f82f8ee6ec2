"""The CUDA source of one kernel: its file with its constants in front. Read where a model is compiled."""

from __future__ import annotations

from importlib.resources import files

from mllm_compile.runtime.stream_linear.shapes import LinearTiling
from mllm_compile.runtime.stream_linear.tiles import TileTiling

_INSTRUCTION = """
__device__ __forceinline__ void multiply_add_all(float* d, unsigned long long a, unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 {{{sums}}}, %{a}, %{b}, 1, 1, 1, 0, 0;"
               : {outputs} : "l"(a), "l"(b));
}}
"""


def kernel_source(tiling: LinearTiling) -> str:
    """What is compiled for `tiling`."""
    constants = {**tiling.kind.constants(), **tiling.constants()}
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    instruction = _instruction(tiling.tokens) if isinstance(tiling, TileTiling) and tiling.warp_groups else ""
    return defined + instruction + _read("common.cuh") + _read(tiling.source)


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _instruction(tokens: int) -> str:
    """wgmma of 64 rows and `tokens` tokens; its 64 × tokens sums are tokens / 2 registers of each of 128 threads."""
    count = tokens // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return _INSTRUCTION.format(tokens=tokens, sums=sums, outputs=outputs, a=count, b=count + 1)
