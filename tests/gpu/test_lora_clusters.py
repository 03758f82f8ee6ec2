"""Kernels of adapters whose clusters have whole rows, compiled as for a runtime, against float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.lora_clusters.family import Family
from mllm_compile.runtime.ops.lora_clusters.kernel import ClusterKernel, NormKernel, ShrinkKernel
from tests.gpu.test_few_tokens import MARGIN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

SLOTS, EPS = 8, 1e-6
NUM_TOKENS = (1, 16, 65, 256, 700, 2100)
SHRINKS = [ShrinkKernel(4096, 16), ShrinkKernel(4096, 48), ShrinkKernel(12288, 16), ShrinkKernel(14336, 32)]
NORMS = [NormKernel(4096, 32, 16), NormKernel(4096, 48, 16), NormKernel(1024, 64, 32, plus_one=True)]
DEVICE = torch.device("cuda:0")


def load(kernels: list[ClusterKernel], folder: Path) -> None:
    with KernelCompiler() as compiler:
        compiler.write(kernels, folder, NullReporter())
    Family().load(kernels, {path.stem: path.read_bytes() for path in folder.iterdir()}, DEVICE)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def off_by(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Of the worst token; those without an adapter have zeros."""
    return ((ours.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(1e-3)).max().item()


def slots_of(count: int) -> list[torch.Tensor]:
    """One adapter, eight by turns, in stretches, and none."""
    every = torch.arange(count, device=DEVICE)
    return [one.int() for one in (every * 0 + 2, every % 9 - 1, every * 9 // count - 1, every * 0 - 1)]


def of_own(x: torch.Tensor, factors: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[T, rows] in the type of x: each token's own factors [L, rows, columns] times it; zeros without one."""
    products = torch.stack([x @ one.to(x.dtype).T for one in factors])
    return products[slots.clamp(0).long(), torch.arange(len(x), device=DEVICE)] * (slots >= 0)[:, None]


def test_the_self_check_finds_them_right(tmp_path: Path) -> None:
    kernels = [*SHRINKS, *NORMS]
    load(kernels, tmp_path)
    assert list(Family().faults(kernels, DEVICE)) == []


@pytest.mark.parametrize("kernel", SHRINKS, ids=lambda kernel: kernel.name)
def test_products_with_a_are_as_near_to_float32_as_torchs_and_alike_in_any_company(tmp_path, kernel) -> None:
    load([kernel], tmp_path)
    a = random(SLOTS, kernel.a_rows, kernel.columns) / kernel.columns**0.5
    for count in NUM_TOKENS:
        x = random(count, kernel.columns)
        for slots in slots_of(count):
            ours = op("lora_shrink_in_clusters")(x, a, slots, False)
            exact = of_own(x.float(), a, slots)
            assert off_by(ours[0], exact) <= MARGIN * off_by(of_own(x, a, slots), exact) + 1e-6, count
            assert torch.equal(ours, op("lora_shrink_in_clusters")(x, a, slots, True))
            last = op("lora_shrink_in_clusters")(x[-1:], a, slots[-1:], True)
            assert torch.equal(last[0], ours[0, -1:])


@pytest.mark.parametrize("kernel", NORMS, ids=lambda kernel: kernel.name)
def test_norms_between_adapters_are_as_near_to_float32_as_torchs_and_alike_in_any_company(tmp_path, kernel) -> None:
    load([kernel], tmp_path)
    a, b = (
        random(SLOTS, kernel.a_rows, kernel.columns) / kernel.columns**0.5,
        random(SLOTS, kernel.columns, kernel.rank),
    )
    weight = random(kernel.columns)

    def by_torch(dtype, y, residual, shrunk, slots):
        out = residual.to(dtype) + (y.to(dtype) + of_own(shrunk[0].to(dtype), b, slots))
        normed = out.float() * torch.rsqrt(out.float().square().mean(-1, keepdim=True) + EPS)
        normed = (normed * (weight.float() + kernel.plus_one)).to(dtype)
        return out, normed, of_own(normed, a, slots)[None]

    for count in NUM_TOKENS:
        y, residual, shrunk = (
            random(count, kernel.columns),
            random(count, kernel.columns),
            random(1, count, kernel.rank),
        )
        for slots in slots_of(count):

            def ours_of(tokens, given=(y, residual, shrunk, slots)):
                y, residual, shrunk, slots = given
                operands = y[tokens], shrunk[:, tokens].contiguous(), b, slots[tokens], residual[tokens]
                return op("lora_norm_in_clusters")(*operands, weight, EPS, kernel.plus_one, a)

            ours = ours_of(slice(None))
            exact, torchs = (by_torch(dtype, y, residual, shrunk, slots) for dtype in (torch.float32, torch.bfloat16))
            margins = MARGIN, MARGIN, 1.5  # of few numbers behind two roundings
            for made, its, theirs, margin in zip(ours, exact, torchs, margins, strict=True):
                assert off_by(made, its) <= margin * off_by(theirs, its) + 1e-6, count
            last = ours_of(slice(count - 1, None))
            assert all(torch.equal(one, all_[..., -1:, :]) for one, all_ in zip(last, ours, strict=True))
            assert all(map(torch.equal, ours_of(slice(None)), ours))
