"""The CUDA source of one kernel: kernel.cu with its constants in front. Read where a model is compiled."""

from __future__ import annotations

from importlib.resources import files

from mllm_compile.runtime.stream_linear.shapes import LinearTiling

_INSTRUCTION = """
__device__ __forceinline__ void multiply_add(float* d, unsigned long long a, unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 {{{sums}}}, %{a}, %{b}, 1, 1, 1, 0, 0;"
               : {outputs} : "l"(a), "l"(b));
}}
"""


def kernel_source(tiling: LinearTiling) -> str:
    """What is compiled for `tiling`."""
    kind = tiling.kind
    constants = {
        "N": kind.rows,
        "K": kind.columns,
        "NORM_BLOCKS": kind.norm_blocks,
        "GATED": int(kind.gated),
        "RESIDUAL": int(kind.residual),
        "NORM_NEXT": int(kind.norm_next),
        "TOKENS": tiling.tokens,
        "ROWS": tiling.rows,
        "SPLIT": tiling.split,
        "STAGES": tiling.stages,
        "WARP_GROUPS": tiling.warp_groups,
        "WARPS_N": tiling.warps_n,
        "WARPS_K": tiling.warps_k,
    }
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    body = files(__package__).joinpath("kernel.cu").read_text(encoding="utf-8")
    return defined + (_instruction(tiling.tokens) if tiling.warp_groups else "") + body


def _instruction(tokens: int) -> str:
    """wgmma of 64 rows and `tokens` tokens; its 64 × tokens sums are tokens / 2 registers of each of 128 threads."""
    count = tokens // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return _INSTRUCTION.format(tokens=tokens, sums=sums, outputs=outputs, a=count, b=count + 1)
