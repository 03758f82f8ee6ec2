"""Microseconds and TFLOP/s of Qwen3-8B's linears with many tokens: in bfloat16, and of fp8 inputs and weights.

    python -m benchmarks.kernels.scaled_linears_speed [--tokens 128,256,1024,8192] [--sweep]

Needs a Hopper GPU. `row` has a scale a token and a row, as a step computes it, and `library` the same by the library;
`group` has one for 128 inputs of either. Conversion of inputs to fp8 is not in it. --sweep times each division of
`row`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import linear

from benchmarks.binaries import binaries_of
from benchmarks.script import need_hopper, parser_of, positives
from mllm_compile.bench.timing.graph import graph_us
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.ops.scaled_linear.kernel import (
    FEWEST_TOKENS,
    MAX_TOKENS,
    ScaledKind,
    ScaledTiling,
    bucket_of,
    scaled_kernels,
)
from mllm_compile.runtime.ops.scaled_linear.ops import load_scaled_kernels, scaled_linear

LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
COLD_BYTES = 300 << 20  # of the weights of a graph: more than the L2 cache holds


def in_fp8(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = x.float().unflatten(-1, (groups, -1))
    scales = (parts.abs().amax(-1, True) / 448).clamp(1e-12)
    return (parts / scales).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1)


def load(compiler: KernelCompiler, kernels: Sequence[ScaledTiling]) -> None:
    load_scaled_kernels(kernels, binaries_of(compiler, kernels), torch.device("cuda:0"))


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positives, default="128,256,1024,8192")
    parser.add_argument("--sweep", action="store_true", help="other divisions of `row` too")
    options = parser.parse_args(arguments)
    need_hopper()
    print(f"{machine_line()}, microseconds and TFLOP/s")
    with KernelCompiler() as compiler:
        for name, (rows, columns) in LINEARS.items():
            load(compiler, scaled_kernels(rows, columns))
            count = COLD_BYTES // (rows * columns) + 1
            weights = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(count)]
            forms = {
                form: [in_fp8(weight, groups) for weight in weights]
                for form, groups in (("row", 1), ("group", columns // 128))
            }
            for tokens in options.tokens:
                x = torch.randn(tokens, columns, device="cuda").bfloat16()
                calls: dict[str, Callable[[], object]] = {"bf16": lambda: [linear(x, weight) for weight in weights]}  # noqa: B023
                for form, of_form in forms.items():
                    inputs = in_fp8(x, of_form[0][1].shape[1])
                    calls[form] = lambda inputs=inputs, of_form=of_form: [scaled_linear(*inputs, *w) for w in of_form]
                inputs = in_fp8(x, 1)
                calls["library"] = lambda: [by_library(*inputs, *weight) for weight in forms["row"]]  # noqa: B023
                flops = 2 * tokens * rows * columns
                times = {form: graph_us(call) / count for form, call in calls.items()}
                said = "".join(f"  {form} {time:.1f} ({flops / time / 1e6:.0f})" for form, time in times.items())
                print(f"{name:8}{tokens:6}{said}")
                if options.sweep and FEWEST_TOKENS <= tokens <= MAX_TOKENS:
                    sweep(compiler, ScaledKind(rows, columns), tokens, calls["row"], count)
    return 0


def by_library(x: torch.Tensor, x_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(x, values.t(), x_scales, scales.t(), out_dtype=torch.bfloat16, use_fast_accum=True)


def sweep(compiler: KernelCompiler, kind: ScaledKind, tokens: int, call: Callable[[], object], count: int) -> None:
    found = []
    tilings = list(ScaledTiling.all_of(kind, bucket_of(tokens)))
    compiler.start(tilings)
    for tiling in tilings:
        load(compiler, [tiling])
        found.append((graph_us(call) / count, tiling))
    for time, tiling in sorted(found, key=lambda one: one[0]):
        division = f"{tiling.groups} groups, {tiling.token_tiles} tiles of tokens, split {tiling.split}"
        print(f"{'':14}{time:8.1f}  {division}, estimated {tiling.cost:.1f}")
    load(compiler, scaled_kernels(kind.rows, kind.columns))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
