"""The linear in fp8 for up to 256 tokens, compiled as for a runtime, against float64; each division; captured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.ops import family, op
from mllm_compile.runtime.ops.scaled_linear.kernel import BUCKETS, ScaledKind, ScaledTiling, scaled_kernels
from mllm_compile.runtime.ops.scaled_linear.ops import load_scaled_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

# Weights of Qwen3-8B and 0.6B; one that divides up to 96 tokens; one tile; rows that tiles do not divide, and columns
# of an odd number of panels.
WEIGHTS = [(24576, 4096), (4096, 12288), (6144, 1024), (1024, 4096), (64, 128), (320, 384)]
MOST_ERROR = 4e-3  # of a sum in tensor cores and its rounding to bfloat16


def load(kernels: Sequence[ScaledTiling], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with KernelCompiler() as compiler:
        compiler.write(kernels, folder, NullReporter())
    load_scaled_kernels(kernels, {path.stem: path.read_bytes() for path in folder.iterdir()}, torch.device("cuda:0"))


def random(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    return values, torch.rand(rows, 1, generator=generator, device="cuda") + 0.01


def off_by(x, weight) -> float:
    """The distance of the worst token's outputs from float64."""
    exact = (x[0].double() * x[1]) @ (weight[0].double() * weight[1]).t()
    ours = op("scaled_linear")(*x, *weight)
    return ((ours - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item()


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
def test_it_multiplies_what_its_operands_stand_for(tmp_path, shape):
    load(scaled_kernels(*shape), tmp_path)
    weight = random(*shape, 0)
    for tokens in (1, 7, 8, 9, 65, *(count for bucket in BUCKETS for count in (bucket, bucket + 1)), 300):
        assert off_by(random(tokens, shape[1], 1), weight) < MOST_ERROR, tokens
    assert not list(family("scaled_linear").faults(scaled_kernels(*shape), torch.device("cuda:0")))


def test_every_division_multiplies_the_same(tmp_path):
    weight, x = random(1280, 1024, 0), {tokens: random(tokens, 1024, 1) for tokens in (8, 200, 256)}
    for number, tiling in enumerate(ScaledTiling.all_of(ScaledKind(1280, 1024), 256)):
        load([tiling], tmp_path / str(number))
        assert off_by(x[256], weight) < MOST_ERROR, tiling
    for number, tiling in enumerate(ScaledTiling.all_of(ScaledKind(1280, 1024), 224)):
        load([tiling], tmp_path / f"uneven{number}")
        assert off_by(x[200], weight) < MOST_ERROR, tiling
    for number, tiling in enumerate(ScaledTiling.all_of(ScaledKind(1280, 1024), BUCKETS[0])):
        load([tiling], tmp_path / f"few{number}")
        assert off_by(x[8], weight) < MOST_ERROR, tiling


def test_a_graph_replays_it_on_other_inputs(tmp_path):
    load(scaled_kernels(1536, 1024), tmp_path)
    weight, (x, x_scales) = random(1536, 1024, 0), random(200, 1024, 1)
    scaled = op("scaled_linear")
    scaled(x, x_scales, *weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = scaled(x, x_scales, *weight)
    for seed in (2, 3):
        values, scales = random(200, 1024, seed)
        x.copy_(values), x_scales.copy_(scales)
        graph.replay()
        assert torch.equal(captured, scaled(x, x_scales, *weight))
