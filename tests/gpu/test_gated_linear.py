"""The gated linear for many tokens, compiled as for a runtime, against float32; alone and in a package."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.ops.gated_linear.kernel import choose, gated_kernels
from mllm_compile.runtime.ops.gated_linear.ops import load_gated_kernels
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


def load(shape: tuple[int, int], folder) -> None:
    kernels = gated_kernels(*shape)
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
