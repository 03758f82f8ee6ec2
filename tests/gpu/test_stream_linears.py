"""The linears that stream their weights, compiled as for a runtime, against float32; alone and in a package."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.functional import linear, silu

from mllm_compile.linear_kernels import LinearCompiler, can_compile_linears
from mllm_compile.progress import NullReporter
from mllm_compile.runtime.stream_linear.ops import load_kernels
from mllm_compile.runtime.stream_linear.shapes import NORM_ROWS, TOKEN_BUCKETS, LinearKind, choose_tiling
from tests.gpu.test_few_tokens import EPS, MARGIN, compiled, layer, off_by, random_inputs, shapes_of
from tests.gpu.test_few_tokens import SOURCE as FEW_SOURCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_linears("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

# hidden, all heads, feed-forward: of Qwen3-0.6B and 8B, and such that tiles are of other sizes.
SHAPES = [(1024, 2048, 3072), (4096, 4096, 12288), (2048, 2304, 4352), (8192, 1024, 2048)]
NUM_TOKENS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64]
SOURCE = FEW_SOURCE.replace("few_linear", "stream_linear")


def kinds_of(hidden: int, heads: int, ffn: int) -> list[LinearKind]:
    blocks = hidden // NORM_ROWS
    return [
        LinearKind(hidden, heads, residual=True, norm_next=True),
        LinearKind(2 * ffn, hidden, blocks, gated=True),
        LinearKind(hidden, ffn, residual=True, norm_next=True),
        LinearKind(6 * hidden // 4, hidden, blocks),
    ]


def load(kinds: list[LinearKind], folder) -> None:
    tilings = [choose_tiling(kind, tokens) for kind in kinds for tokens in TOKEN_BUCKETS]
    with LinearCompiler() as compiler:
        compiler.write(tilings, folder, NullReporter())
    load_kernels(tilings, {path.stem: path.read_bytes() for path in folder.iterdir()}, torch.device("cuda:0"))


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def piece(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("linears")
    load(kinds_of(*request.param), folder)
    shapes = shapes_of(*request.param)
    return compiled(tmp_path_factory.mktemp("piece"), SOURCE, shapes), shapes


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_a_layers_linears_are_as_near_to_float32_as_torchs(piece, num_tokens):
    function, shapes = piece
    inputs = random_inputs(shapes, num_tokens)
    exact = layer(*(x.float() for x in inputs))
    theirs = layer(*inputs)
    for ours, torchs, true in zip(function(list(inputs)), theirs, exact, strict=True):
        assert off_by(ours, true) <= MARGIN * off_by(torchs, true)


@pytest.mark.parametrize("num_tokens", [5, 40])
def test_a_graph_replays_them_on_other_inputs(piece, num_tokens):
    function, shapes = piece
    inputs = random_inputs(shapes, num_tokens)
    function(list(inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(list(inputs))
    inputs[0].copy_(inputs[0].flip(1) * 0.5)
    graph.replay()
    for captured, direct in zip(outputs, function(list(inputs)), strict=True):
        assert torch.equal(captured, direct)


WIDTHS = [(64, 1024), (320, 1024), (64, 4096), (1152, 4096), (128, 256), (151936, 1024), (128256, 4096)]


@pytest.mark.parametrize(("rows", "columns"), WIDTHS)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 20, 64])
def test_without_norms_for_any_width(tmp_path, rows, columns, num_tokens):
    kinds = [LinearKind(rows, columns), LinearKind(rows, columns, residual=True)]
    load(kinds, tmp_path)
    x, weight, residual = random_inputs([("T", columns), (rows, columns), ("T", rows)], num_tokens)
    product = linear(x.float(), weight.float())
    ours = torch.ops.mllm.stream_linear(x, weight, None, 0.0, False)
    assert off_by(ours, product) <= MARGIN * off_by(linear(x, weight), product)
    summed = torch.ops.mllm.stream_linear_residual(x, weight, residual)
    assert off_by(summed, residual.float() + product) <= MARGIN * off_by(
        residual + linear(x, weight), residual.float() + product
    )


def test_a_gated_one_without_a_norm(tmp_path):
    kind = LinearKind(6144, 1024, gated=True)
    load([kind], tmp_path)
    for num_tokens in TOKEN_BUCKETS:
        x, weight = random_inputs([("T", 1024), (6144, 1024)], num_tokens)
        gate, up = linear(x.float(), weight.float()).chunk(2, -1)
        torch_gate, torch_up = linear(x, weight).chunk(2, -1)
        true = silu(gate) * up
        ours = torch.ops.mllm.stream_linear(x, weight, None, 0.0, True)
        assert off_by(ours, true) <= MARGIN * off_by(silu(torch_gate) * torch_up, true)


def test_an_input_may_lie_anywhere(tmp_path):
    load([LinearKind(64, 256)], tmp_path)
    x, weight = random_inputs([(9, 257), (64, 256)], 9)
    for odd in (x[:, 1:], x.flatten()[1 : 1 + 8 * 256].view(8, 256)):
        ours = torch.ops.mllm.stream_linear(odd, weight, None, 0.0, False)
        assert torch.equal(ours, torch.ops.mllm.stream_linear(odd.clone(), weight, None, 0.0, False))


def test_a_thread_without_a_context_loads_kernels(tmp_path):
    """As an engine does that compiled in the same process: the driver's calls need a context of the thread's own."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(load, [LinearKind(64, 512)], tmp_path).result()
    x, weight = random_inputs([("T", 512), (64, 512)], 4)
    product = linear(x.float(), weight.float())
    ours = torch.ops.mllm.stream_linear(x, weight, None, 0.0, False)
    assert off_by(ours, product) <= MARGIN * off_by(linear(x, weight), product)


def test_what_is_not_loaded_is_named():
    x, weight = random_inputs([("T", 768), (192, 768)], 2)
    with pytest.raises(RuntimeError, match=r"192x768.*load_kernels"):
        torch.ops.mllm.stream_linear(x, weight, None, EPS, False)
