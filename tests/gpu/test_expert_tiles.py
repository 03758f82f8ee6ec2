"""Experts' linears of many tokens on Hopper, compiled as for a runtime, against float32; and what is around them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.ops.expert_tiles.kernel import BLOCK, ExpertTilesKernel
from mllm_compile.runtime.ops.experts.linear import expert_linear_reference
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

MARGIN = 1.2
# Experts, experts a token, inputs, activated outputs: Qwen3-30B-A3B's; partial tiles; one expert.
SHAPES = [(128, 8, 2048, 768), (12, 3, 192, 192), (5, 2, 64, 320), (1, 1, 128, 64)]
TOKENS = [1, 63, 257, 300, 1025, 4000]
PADDING = 5


def load(shape: tuple[int, int, int, int], folder) -> None:
    from mllm_compile.runtime.ops.expert_tiles.ops import load_expert_tiles

    _, _, inputs, outputs = shape
    kernels = ExpertTilesKernel(2 * outputs, inputs, True), ExpertTilesKernel(inputs, outputs, False)
    with KernelCompiler() as compiler:
        compiler.write(kernels, folder, NullReporter())
    load_expert_tiles(kernels, {path.stem: path.read_bytes() for path in folder.iterdir()}, torch.device("cuda:0"))


def weights_of(shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    experts, _, inputs, outputs = shape
    generator = torch.Generator("cuda").manual_seed(0)
    up = torch.randn(experts, 2 * outputs, inputs, generator=generator, device="cuda") * inputs**-0.5
    down = torch.randn(experts, inputs, outputs, generator=generator, device="cuda") * outputs**-0.5
    return up.bfloat16(), down.bfloat16()


def inputs_of(shape: tuple[int, int, int, int], tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts, chosen, inputs, _ = shape
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, inputs, generator=generator, device="cuda").bfloat16()
    ids = torch.rand(tokens, experts, generator=generator, device="cuda").topk(chosen).indices
    return x, ids, torch.arange(1, tokens + 1, device="cuda")


def tiled(x, ids, slots, up, down) -> torch.Tensor:
    from mllm_compile.runtime.ops import op

    order, blocks = op("order_experts")(ids, slots, len(up), BLOCK, 0)
    inner = op("gated_expert_tiles")(x, order, blocks, up, ids.shape[1])
    return op("expert_tiles")(inner, order, blocks, down, ids)


def plain(x, ids, up, down) -> torch.Tensor:
    gate, right = expert_linear_reference(x, ids, up, None, False, True).chunk(2, -1)
    return expert_linear_reference(silu(gate) * right, ids, down, None, False, False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_as_near_to_float32_as_torch(tmp_path, shape):
    load(shape, tmp_path)
    up, down = weights_of(shape)
    for tokens in TOKENS:
        x, ids, slots = inputs_of(shape, tokens)
        ours, true = tiled(x, ids, slots, up, down), plain(x.float(), ids, up.float(), down.float())
        error, limit = ((one.float() - true).norm() for one in (ours, plain(x, ids, up, down)))
        assert error <= MARGIN * limit, tokens


def test_gates_may_be_of_any_size(tmp_path):
    shape = SHAPES[1]
    load(shape, tmp_path)
    up, down = weights_of(shape)
    x, ids, slots = inputs_of(shape, 300)
    for scale in (0.01, 60.0, 3e4):
        scaled = scale * x
        ours, true = tiled(scaled, ids, slots, up, down), plain(scaled.float(), ids, up.float(), down.float())
        error, limit = ((one.float() - true).norm() for one in (ours, plain(scaled, ids, up, down)))
        assert error <= MARGIN * limit, scale


def test_padding_is_zero_and_a_row_of_no_expert_is_its_own_error_alone(tmp_path):
    shape = SHAPES[1]
    load(shape, tmp_path)
    up, down = weights_of(shape)
    x, ids, slots = inputs_of(shape, 700)
    right = tiled(x, ids, slots, up, down)
    slots[-PADDING:], ids[1, 0], ids[2, 1] = 0, shape[0], -1
    ours = tiled(x, ids, slots, up, down)
    chosen = shape[1]
    assert not ours[-PADDING * chosen :].any()
    broken = [chosen, 2 * chosen + 1]
    assert ours[broken].isnan().all()
    others = [row for row in range((700 - PADDING) * chosen) if row not in broken]
    assert torch.equal(ours[others], right[others])


def test_all_rows_may_be_one_experts(tmp_path):
    shape = SHAPES[1]
    load(shape, tmp_path)
    up, down = weights_of(shape)
    x, ids, slots = inputs_of(shape, 1500)
    ids[:] = torch.tensor([7, 2, 9], device="cuda")
    ours, true = tiled(x, ids, slots, up, down), plain(x.float(), ids, up.float(), down.float())
    error, limit = ((one.float() - true).norm() for one in (ours, plain(x, ids, up, down)))
    assert error <= MARGIN * limit


def test_a_graph_replays_them_on_other_choices(tmp_path):
    shape = SHAPES[1]
    load(shape, tmp_path)
    up, down = weights_of(shape)
    x, ids, slots = inputs_of(shape, 300)
    tiled(x, ids, slots, up, down)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tiled(x, ids, slots, up, down)
    for seed in (1, 2):
        generator = torch.Generator("cuda").manual_seed(seed)
        ids.copy_(torch.rand(300, shape[0], generator=generator, device="cuda").topk(shape[1]).indices)
        graph.replay()
        assert torch.equal(captured, tiled(x, ids, slots, up, down))


@pytest.mark.parametrize("shape", [(32, 4, 2880, 5760), (12, 3, 192, 192)], ids=str)
def test_linears_without_a_gate_multiply_what_mxfp4_stands_for(tmp_path, shape):
    """As gpt-oss has them."""
    from mllm_compile.runtime.ops import op
    from mllm_compile.runtime.ops.expert_tiles.ops import load_expert_tiles

    experts, chosen, inputs, outputs = shape
    kernels = [ExpertTilesKernel(outputs, inputs, False)]
    with KernelCompiler() as compiler:
        compiler.write(tuple(kernels), tmp_path, NullReporter())
    load_expert_tiles(kernels, {path.stem: path.read_bytes() for path in tmp_path.iterdir()}, torch.device("cuda:0"))
    generator = torch.Generator("cuda").manual_seed(0)
    plain = torch.randn(experts, outputs, inputs, generator=generator, device="cuda") * inputs**-0.5
    tensors = quantised(plain, MXFP4)
    weight = op("dequantised_experts")(tensors["values"], tensors["scales"], torch.bfloat16)
    assert torch.equal(weight, dequantised(tensors, "mxfp4", 32, inputs, torch.bfloat16))
    for tokens in (257, 2048):
        x, ids, slots = inputs_of((experts, chosen, inputs, outputs), tokens)
        order, blocks = op("order_experts")(ids, slots, experts, BLOCK, 0)
        rows = x.index_select(0, (order // chosen).clamp(0, tokens - 1))
        ours = op("expert_tiles")(rows, order, blocks, weight, ids)
        true = expert_linear_reference(x.float(), ids, weight.float(), None, False, True)
        error, limit = (
            (one.float() - true).norm() for one in (ours, expert_linear_reference(x, ids, weight, None, False, True))
        )
        assert error <= MARGIN * limit, tokens


@pytest.mark.parametrize("of_weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "chosen", "outputs"), [(1, 2, 64), (300, 8, 2048), (77, 3, 1100)])
def test_sums_are_rounded_as_torchs_are(of_weights, tokens, chosen, outputs):
    from mllm_compile.runtime.ops import op

    rows = torch.randn(tokens * chosen, outputs, device="cuda").bfloat16()
    weights = torch.rand(tokens, chosen, device="cuda").to(of_weights)
    products = (rows * weights.reshape(-1, 1)).view(tokens, chosen, -1)
    torch.testing.assert_close(op("sum_experts")(rows, weights), products.sum(1).bfloat16())
