"""The gated linear for many tokens, compiled as for a runtime, against float32; alone and in a package."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.gated_linear.kernel import choose, gated_kernels
from mllm_compile.runtime.ops.gated_linear.ops import load_gated_kernels
from mllm_compile.runtime.ops.lora.reference import add_lora_reference
from tests.gpu.test_few_tokens import MARGIN, compiled, off_by, random_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

# Weights of Qwen3-0.6B, 8B and 4B; the smallest tile; partial tiles; rows that pairs do not divide.
WEIGHTS = [(6144, 1024), (24576, 4096), (19456, 2560), (64, 64), (320, 192), (576, 2048)]
NUM_TOKENS = [1, 8, 63, 65, 128, 129, 193, 200, 256, 257, 300, 320, 384, 449, 512, 832, 1000, 2049, 2240]
SOURCE = """
import torch

class Piece(torch.nn.Module):
    def forward(self, x, weight):
        return (torch.ops.mllm.gated_linear.default(x, weight),)
"""


def load(shape: tuple[int, int], folder, rank: int = 0) -> None:
    kernels = gated_kernels(*shape, rank)
    with KernelCompiler() as compiler:
        compiler.write(kernels, folder, NullReporter())
    load_gated_kernels(kernels, {path.stem: path.read_bytes() for path in folder.iterdir()}, torch.device("cuda:0"))


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
def test_it_is_as_near_to_float32_as_torch(tmp_path, shape):
    load(shape, tmp_path)
    for num_tokens in NUM_TOKENS:
        x, weight = random_inputs([("T", shape[1]), shape], num_tokens)
        (gate, up), (torch_gate, torch_up) = (
            linear(*pair).chunk(2, -1) for pair in ((x.float(), weight.float()), (x, weight))
        )
        true = silu(gate) * up
        ours = torch.ops.mllm.gated_linear(x, weight)
        assert off_by(ours, true) <= MARGIN * off_by(silu(torch_gate) * torch_up, true), num_tokens


def test_a_token_is_the_same_in_any_company_and_by_every_kernel(tmp_path):
    shape = (6144, 1024)
    load(shape, tmp_path)
    assert len({choose(gated_kernels(*shape), count) for count in (200, 300, 512, 2000)}) == 3
    x, weight = random_inputs([("T", 1024), shape], 2000)
    together = torch.ops.mllm.gated_linear(x, weight)
    for count in (1, 200, 300, 512, 1000):
        assert torch.equal(torch.ops.mllm.gated_linear(x[7 : 7 + count], weight), together[7 : 7 + count])


def test_a_graph_replays_it_on_other_inputs(tmp_path):
    load((6144, 1024), tmp_path)
    function = compiled(tmp_path, SOURCE, [("T", 1024), (6144, 1024)])
    for num_tokens in (200, 300, 512, 2100):
        x, weight = random_inputs([("T", 1024), (6144, 1024)], num_tokens)
        function([x, weight])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (captured,) = function([x, weight])
        x.copy_(x.flip(0) * 0.5)
        graph.replay()
        assert torch.equal(captured, function([x, weight])[0])
        assert torch.equal(captured, torch.ops.mllm.gated_linear(x, weight))


@pytest.mark.parametrize(("shape", "rank"), [((24576, 4096), 16), ((6144, 1024), 32), ((576, 2048), 16)], ids=str)
def test_with_adapters_it_is_as_near_to_float32_as_torch_and_a_token_the_same_alone(tmp_path, shape, rank):
    load(shape, tmp_path, rank)
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (
        torch.randn(3, *size, generator=generator, device="cuda") for size in ((2 * rank, shape[1]), (shape[0], rank))
    )
    a, b = (a / shape[1] ** 0.5).bfloat16(), (b / rank**0.5).bfloat16()
    half = shape[0] // 2
    parts = [0, half], [half, half]
    for num_tokens in (8, 200, 257, 320, 449, 1000, 2240):
        x, weight = random_inputs([("T", shape[1]), shape], num_tokens)
        every = torch.arange(num_tokens, device="cuda")
        for slots in (every * 0 + 1, every * 4 // num_tokens - 1, every % 4 - 1, every * 0 - 1):
            slots = slots.int()
            true, torchs = (
                gated(add_lora_reference(linear(x.to(dtype), weight.to(dtype)), *of(dtype, x, a, b), slots, *parts))
                for dtype in (torch.float32, torch.bfloat16)
            )
            shrunk = op("lora_shrink")(x, a, slots, False, False).sum(0).bfloat16()
            ours = torch.ops.mllm.gated_linear_lora(x, weight, shrunk, b, slots)
            assert off_by(ours, true) <= MARGIN * off_by(torchs, true), (num_tokens, slots)
            alone = torch.ops.mllm.gated_linear_lora(x[5:7], weight, shrunk[5:7], b, slots[5:7].clone())
            assert torch.equal(alone, ours[5:7])
            base = torch.ops.mllm.gated_linear_lora(x, weight, shrunk, b, torch.full_like(slots, -1))
            assert torch.equal(ours[slots < 0], base[slots < 0])


def gated(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, -1)
    return silu(gate) * up


def of(dtype: torch.dtype, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(dtype) for tensor in tensors]
