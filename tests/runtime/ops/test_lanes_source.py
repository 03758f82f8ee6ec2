"""lanes.cu's own source on a host: biases, residuals and GELU, against torch in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import gelu, linear

from mllm_compile.runtime.ops.stream_linear.lanes import LaneTiling, choose
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind
from tests.runtime.host_kernel import host_program, needs_compiler, run_program

MARGIN = 1.2  # of the error of torch in bfloat16
MAIN = """
int main(int count, char** paths) {
  char* given[4];
  const int tokens = std::atoi(paths[1]);
  for (int i = 0; i < 4; i++) given[i] = bytes_of(paths[i + 2]);
  char* out = (char*)std::calloc(tokens, OUTPUTS * 2);
  launch(BLOCKS, 32 * WARPS, SHARED_BYTES, [=] {
    stream_linear(given[0], given[1], nullptr, (const u32*)given[2], (const u32*)given[3], (u32*)out, nullptr, nullptr,
                  0.f, tokens);
  });
  write_bytes(paths[6], out, tokens * OUTPUTS * 2);
}
"""
# Warps that have a step more than others; a warp that has none; tiles that a block has several of.
KIND = LinearKind(24, 320, bias=True)
TILINGS = [
    choose(KIND),
    choose(replace(KIND, columns=192, gelu=True)),
    LaneTiling(replace(KIND, gelu=True), 8, tiles=2, warps=8),
    choose(replace(KIND, residual=True)),
    choose(replace(KIND, gelu=True)),
]


def run(tiling: LaneTiling, operands: list[torch.Tensor], tokens: int, folder: Path) -> torch.Tensor:
    """The kernel's outputs; operands: weight, x, residual and bias."""
    main = MAIN.replace("BLOCKS,", f"{tiling.num_blocks},")
    program = host_program(tiling, main, folder)
    paths = [folder / f"given{index}" for index in range(len(operands))]
    for path, operand in zip(paths, operands, strict=True):
        path.write_bytes(operand.view(torch.uint8).numpy().tobytes())
    run_program(program, tokens, *paths, folder / "out")
    out = torch.frombuffer(bytearray((folder / "out").read_bytes()), dtype=torch.bfloat16)
    return out.view(tokens, tiling.kind.rows)


@needs_compiler
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: f"{tiling.name}_{tiling.tiles}")
def test_a_linear_with_what_is_around_it_is_as_near_to_float32_as_torchs(tiling: LaneTiling, tmp_path: Path) -> None:
    kind, tokens, generator = tiling.kind, 5, torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    x, weight, bias = random(tokens, kind.columns), random(kind.rows, kind.columns), random(kind.rows)
    residual = random(tokens, kind.rows)

    def torchs(*given: torch.Tensor) -> torch.Tensor:
        weight, x, residual, bias = given
        out = linear(x, weight, bias)
        out = gelu(out) if kind.gelu else out
        return residual + out if kind.residual else out

    given = [weight, x, residual, bias]
    exact = torchs(*(one.float() for one in given))
    ours = run(tiling, given, tokens, tmp_path)
    assert (ours.float() - exact).norm() <= MARGIN * (torchs(*given).float() - exact).norm()
