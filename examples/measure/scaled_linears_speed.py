"""Microseconds and TFLOP/s of Qwen3-8B's linears with many tokens: in bfloat16, and of fp8 inputs and weights.

    python examples/measure/scaled_linears_speed.py [--tokens 128,256,1024,8192]

Needs a Hopper GPU. `row` has a scale a token and a row, `group` one for 128 inputs of either; what makes inputs of fp8
is not in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from graph_times import graph_us
from mistakes import need_hopper, positives
from torch.nn.functional import linear

from mllm_compile.runtime.ops import op

LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
LAUNCHES = 4


def in_fp8(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = x.float().unflatten(-1, (groups, -1))
    scales = (parts.abs().amax(-1, True) / 448).clamp(1e-12)
    return (parts / scales).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positives, default="128,256,1024,8192")
    options = parser.parse_args(arguments)
    need_hopper()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, microseconds and TFLOP/s")
    for name, (rows, columns) in LINEARS.items():
        weight = torch.randn(rows, columns, device="cuda").bfloat16()
        forms = {"row": in_fp8(weight, 1), "group": in_fp8(weight, columns // 128)}
        for tokens in options.tokens:
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            times = {"bf16": graph_us(lambda: linear(x, weight), LAUNCHES)}  # noqa: B023 - called at once
            for form, (values, scales) in forms.items():
                inputs, x_scales = in_fp8(x, scales.shape[1])
                scaled = op("scaled_linear")
                times[form] = graph_us(lambda: scaled(inputs, x_scales, values, scales), LAUNCHES)  # noqa: B023
            flops = 2 * tokens * rows * columns
            said = "".join(f"  {form} {time:.1f} ({flops / time / 1e6:.0f})" for form, time in times.items())
            print(f"{name:8}{tokens:6}{said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
