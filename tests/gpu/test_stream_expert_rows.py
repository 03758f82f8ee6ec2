"""Linears of experts in MXFP4 with few rows on Hopper, compiled as for a runtime, against float32; and in graphs."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.ops.experts.linear import expert_linear_reference
from mllm_compile.runtime.ops.experts.shapes import ONE_ROW
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4, SCALES, VALUES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

MARGIN = 1.2
ALPHA, LIMIT = 1.702, 7.0
# Experts, experts a token, inputs of gate_up, inputs of down, outputs: gpt-oss-20b's, and few and narrow ones.
SHAPES = [(32, 4, 2880, 2880, 2880), (12, 3, 192, 96, 176), (128, 8, 2048, 768, 2048), (2, 1, 64, 32, 32)]
PADDING = 5


class Layer:
    """Both linears of a layer's experts, with their kernels loaded for blocks of so many rows."""

    def __init__(self, shape, block, folder) -> None:
        from mllm_compile.runtime.ops.stream_expert_rows.ops import load_expert_rows, rows_kernel

        self.experts, self.chosen, inputs, hidden, outputs = shape
        self.block = block
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator, device="cuda")

        self.weights, self.biases, self.plain = [], [], []
        for rows, columns in ((2 * hidden, inputs), (outputs, hidden)):
            tensors = quantised(random(self.experts, rows, columns) * columns**-0.5, MXFP4)
            self.weights.append((tensors[VALUES], tensors[SCALES]))
            self.plain.append(dequantised(tensors, "mxfp4", 32, columns, torch.float32))
            self.biases.append(random(self.experts, rows).bfloat16())
        kernels = [
            rows_kernel(values, bias, self.chosen, is_up, is_up, not is_up, block)
            for (values, _), bias, is_up in zip(self.weights, self.biases, (True, False), strict=True)
        ]
        with KernelCompiler() as compiler:
            compiler.write(tuple(kernels), folder, NullReporter())
        binaries = {path.stem: path.read_bytes() for path in folder.iterdir()}
        load_expert_rows(kernels, binaries, torch.device("cuda:0"))

    def inputs(self, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(tokens + seed)
        columns = self.plain[0].shape[2]
        x = torch.randn(tokens, columns, generator=generator, device="cuda").bfloat16()
        ids = torch.rand(tokens, self.experts, generator=generator, device="cuda").topk(self.chosen).indices
        return x, ids, torch.arange(1, tokens + 1, device="cuda")

    def streamed(self, x, ids, slots) -> tuple[torch.Tensor, torch.Tensor]:
        from mllm_compile.runtime.ops import op

        order, blocks = ids, None
        if self.block != ONE_ROW:
            order, blocks = op("order_experts")(ids, slots, self.experts, self.block, 0)
        of = op("stream_expert_rows")
        (up, down), (up_bias, down_bias) = self.weights, self.biases
        rows = of(x, order, blocks, *up, up_bias, self.chosen, True, True, ALPHA, LIMIT, False, self.block)
        return rows, of(rows, order, blocks, *down, down_bias, self.chosen, False, False, 0.0, 0.0, True, self.block)

    def theirs(self, x, ids, dtype) -> tuple[torch.Tensor, torch.Tensor]:
        (up, down), (up_bias, down_bias) = ([one.to(dtype) for one in both] for both in (self.plain, self.biases))
        pairs = expert_linear_reference(x.to(dtype), ids, up, up_bias, False, True)
        gate, right = pairs[:, ::2].clamp(max=LIMIT), pairs[:, 1::2].clamp(-LIMIT, LIMIT)
        rows = (right + 1) * (gate * torch.sigmoid(gate * ALPHA))
        return rows, expert_linear_reference(rows, ids, down, down_bias, False, False)


@pytest.mark.parametrize("block", [ONE_ROW, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_as_near_to_float32_as_torch(tmp_path, shape, block):
    layer = Layer(shape, block, tmp_path)
    for tokens in (1,) if block == ONE_ROW else (1, 2, 8, 9, 64, 200):
        x, ids, slots = layer.inputs(tokens)
        ours, true = layer.streamed(x, ids, slots), layer.theirs(x, ids, torch.float32)
        for mine, rounded, exact in zip(ours, layer.theirs(x, ids, torch.bfloat16), true, strict=True):
            error, limit = ((one.float() - exact).norm() for one in (mine, rounded))
            assert error <= MARGIN * limit, tokens


def test_padding_is_zero_and_a_row_of_no_expert_is_its_own_error_alone(tmp_path):
    layer = Layer(SHAPES[1], 16, tmp_path)
    x, ids, slots = layer.inputs(60)
    right = layer.streamed(x, ids, slots)[1]
    slots[-PADDING:], ids[1, 0], ids[2, 1] = 0, layer.experts, -1
    ours = layer.streamed(x, ids, slots)[1]
    chosen = layer.chosen
    assert not ours[-PADDING * chosen :].any()
    broken = [chosen, 2 * chosen + 1]
    assert ours[broken].isnan().all()
    others = [row for row in range((60 - PADDING) * chosen) if row not in broken]
    assert torch.equal(ours[others], right[others]), "a row's numbers do not depend on others"


def test_all_rows_may_be_one_experts(tmp_path):
    layer = Layer(SHAPES[1], 16, tmp_path)
    x, ids, slots = layer.inputs(64)
    ids[:] = torch.tensor([7, 2, 9], device="cuda")
    ours, true = layer.streamed(x, ids, slots)[1], layer.theirs(x, ids, torch.float32)[1]
    error, limit = ((one.float() - true).norm() for one in (ours, layer.theirs(x, ids, torch.bfloat16)[1]))
    assert error <= MARGIN * limit


@pytest.mark.parametrize("block", [ONE_ROW, 16])
def test_a_graph_replays_it_on_other_choices(tmp_path, block):
    layer = Layer(SHAPES[1], block, tmp_path)
    x, ids, slots = layer.inputs(1 if block == ONE_ROW else 64)
    layer.streamed(x, ids, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = layer.streamed(x, ids, slots)[1]
    for seed in (1, 2, 3):
        x_now, ids_now, _ = layer.inputs(len(x), seed)
        x.copy_(x_now), ids.copy_(ids_now)
        graph.replay()
        assert torch.equal(ours, layer.streamed(x, ids, slots)[1])
        true = layer.theirs(x, ids, torch.float32)[1]
        error, limit = ((one.float() - true).norm() for one in (ours, layer.theirs(x, ids, torch.bfloat16)[1]))
        assert error <= MARGIN * limit
