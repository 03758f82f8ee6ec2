"""The linears that stream their weights, compiled as for a runtime, against float32; alone and in a package."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn.functional import gelu, linear, silu

from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.cuda.driver import address_of
from mllm_compile.runtime.ops.stream_linear.linear import TOKEN_BUCKETS, LinearKind, bucket_of
from mllm_compile.runtime.ops.stream_linear.ops import STREAMED
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling, is_streamed, num_streamed_norm_blocks
from tests.gpu.late_kernels import LATE_BLOCKS, late_kernel
from tests.gpu.test_few_tokens import EPS, MARGIN, compiled, layer, off_by, random_inputs, shapes_of
from tests.gpu.test_few_tokens import SOURCE as FEW_SOURCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

# hidden, all heads, feed-forward: of Qwen3-0.6B, 8B and 4B; all kernels in one layer; tiles of other sizes; the longest
# rows that rows.cu takes; and tiles.cu behind lanes.cu, for few tokens.
SHAPES = [(1024, 2048, 3072), (4096, 4096, 12288), (2560, 4096, 9728), (2048, 2304, 4352), (512, 1280, 1792)]
SHAPES += [(2048, 2048, 24576), (1024, 1024, 16384)]
NUM_TOKENS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128]
NUM_TOKENS += [129, 143, 144, 145, 160, 176, 187, 192, 208, 209, 224, 240, 241, 255, 256]
SOURCE = FEW_SOURCE.replace("few_linear", "stream_linear")


def kinds_of(hidden: int, heads: int, ffn: int) -> list[LinearKind]:
    of_o, of_down = num_streamed_norm_blocks(hidden, heads), num_streamed_norm_blocks(hidden, ffn)
    return [
        LinearKind(hidden, heads, residual=True, next_blocks=of_o),
        LinearKind(2 * ffn, hidden, of_o, gated=True),
        LinearKind(hidden, ffn, residual=True, next_blocks=of_down),
        LinearKind(6 * hidden // 4, hidden, of_down),
    ]


def is_taken(shape: tuple[int, int, int], num_tokens: int) -> bool:
    return all(is_streamed(kind.rows, kind.columns, num_tokens) for kind in kinds_of(*shape))


def load(kinds: list[LinearKind], folder, buckets_of: tuple[int, ...] = TOKEN_BUCKETS) -> None:
    buckets = [(kind, bucket_of(tokens)) for kind in kinds for tokens in buckets_of]
    tilings = [choose_tiling(kind, tokens) for kind, tokens in buckets if is_streamed(kind.rows, kind.columns, tokens)]
    with KernelCompiler() as compiler:
        compiler.write(tilings, folder, NullReporter())
    STREAMED.load_kernels(tilings, {path.stem: path.read_bytes() for path in folder.iterdir()}, torch.device("cuda:0"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A layer's linears in a package, by shape; its kernels loaded."""

    @cache
    def of(shape):
        load(kinds_of(*shape), tmp_path_factory.mktemp("linears"))
        shapes = shapes_of(*shape)
        return compiled(tmp_path_factory.mktemp("piece"), SOURCE, shapes), shapes

    return of


def cases(counts: list[int]) -> list[tuple[tuple[int, int, int], int]]:
    return [(shape, count) for shape in SHAPES for count in counts if is_taken(shape, count)]


@pytest.mark.parametrize(("shape", "num_tokens"), cases(NUM_TOKENS), ids=str)
def test_a_layers_linears_are_as_near_to_float32_as_torchs(pieces, shape, num_tokens):
    function, shapes = pieces(shape)
    inputs = random_inputs(shapes, num_tokens)
    exact = layer(*(x.float() for x in inputs))
    theirs = layer(*inputs)
    for ours, torchs, true in zip(function(list(inputs)), theirs, exact, strict=True):
        assert off_by(ours, true) <= MARGIN * off_by(torchs, true)


@pytest.mark.parametrize(("shape", "num_tokens"), cases([5, 40, 100, 150, 237]), ids=str)
def test_a_graph_replays_them_on_other_inputs(pieces, shape, num_tokens):
    function, shapes = pieces(shape)
    inputs = random_inputs(shapes, num_tokens)
    function(list(inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(list(inputs))
    inputs[0].copy_(inputs[0].flip(1) * 0.5)
    graph.replay()
    for captured, direct in zip(outputs, function(list(inputs)), strict=True):
        assert torch.equal(captured, direct)


@pytest.mark.parametrize("num_tokens", [5, 40, 150])
@pytest.mark.parametrize(("rows", "columns"), [(1024, 2048), (4096, 12288)])
def test_a_norms_weight_with_one_added_is_rounded_once(tmp_path, rows, columns, num_tokens):
    blocks = num_streamed_norm_blocks(rows, columns)
    load([LinearKind(rows, columns, residual=True, next_blocks=blocks, plus_one=True)], tmp_path, (num_tokens,))
    shapes = {"x": (num_tokens, columns), "weight": (rows, columns), "residual": (num_tokens, rows), "norm": (rows,)}
    x, weight, residual, norm = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes.values())
    h, scaled, _ = torch.ops.mllm.stream_linear_residual_norm(x, weight, residual, norm, True)
    exact = h.double() * (1 + norm.double())
    assert ((scaled.double() - exact).abs() <= 2**-8 * exact.abs()).all()


@pytest.mark.parametrize("num_tokens", [5, 40, 150])
@pytest.mark.parametrize(("rows", "columns"), [(1024, 2048), (12288, 4096)])
def test_the_square_of_a_relu_matches_the_rounded_sums(tmp_path, rows, columns, num_tokens):
    plain = LinearKind(rows, columns, bias=True)
    load([plain, replace(plain, squared_relu=True)], tmp_path, (num_tokens,))
    x, weight, bias = random_inputs([("T", columns), (rows, columns), (rows,)], num_tokens)
    sums, squared = (torch.ops.mllm.stream_linear(x, weight, None, 0.0, False, bias, of) for of in (False, True))
    assert torch.equal(squared, sums.relu().square())


@pytest.mark.parametrize("num_tokens", [5, 40, 150])
@pytest.mark.parametrize(("rows", "columns"), [(1024, 2048), (12288, 4096)])
def test_gelu_is_that_of_the_rounded_sums(tmp_path, rows, columns, num_tokens):
    plain = LinearKind(rows, columns, bias=True)
    load([plain, replace(plain, gelu=True)], tmp_path, (num_tokens,))
    x, weight, bias = random_inputs([("T", columns), (rows, columns), (rows,)], num_tokens)
    sums, ours = (torch.ops.mllm.stream_linear(x, weight, None, 0.0, False, bias, False, of) for of in (False, True))
    true = gelu(sums.double())
    assert ((ours.double() - true).abs() <= 2**-8 * true.abs() + 1e-6).all()


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 40, 150])
@pytest.mark.parametrize(("rows", "columns"), [(1280, 1280), (1280, 5120), (4096, 4096)])
def test_a_biased_product_is_rounded_ahead_of_the_residual(tmp_path, rows, columns, num_tokens):
    plain = LinearKind(rows, columns, bias=True)
    load([plain, replace(plain, residual=True)], tmp_path, (num_tokens,))
    x, weight, bias, residual = random_inputs([("T", columns), (rows, columns), (rows,), ("T", rows)], num_tokens)
    product = torch.ops.mllm.stream_linear(x, weight, None, 0.0, False, bias)
    assert torch.equal(torch.ops.mllm.stream_linear_residual(x, weight, residual, bias), residual + product)


WIDTHS = [(32, 2880), (64, 1024), (320, 1024), (64, 4096), (1152, 4096), (128, 256), (151936, 1024), (128256, 4096)]
WIDTHS += [(6144, 1536), (4096, 2304), (3584, 18944), (4096, 14336), (65472, 2048), (8192, 8192)]
WIDTHS += [(1152, 896), (896, 4864), (1920, 960), (4608, 3584)]  # of Qwen2.5-0.5B and 7B; odd numbers of panels
WIDTHS += [(51866, 1280)]  # of Whisper's head


@pytest.mark.parametrize(
    ("rows", "columns", "num_tokens"),
    [
        (*width, count)
        for width in WIDTHS
        for count in (1, 3, 8, 16, 20, 64, 90, 128, 131, 170, 208, 253)
        if is_streamed(*width, count)
    ],
)
def test_without_norms_for_any_width(tmp_path, rows, columns, num_tokens):
    plain = LinearKind(rows, columns)
    load([plain, replace(plain, bias=True), replace(plain, residual=True)], tmp_path, (num_tokens,))
    x, weight, residual = random_inputs([("T", columns), (rows, columns), ("T", rows)], num_tokens)
    product = linear(x.float(), weight.float())
    for bias in (None, residual[0].clone()):
        ours = torch.ops.mllm.stream_linear(x, weight, None, 0.0, False, bias)
        true = product if bias is None else product + bias
        assert off_by(ours, true) <= MARGIN * off_by(linear(x, weight, bias), true)
    summed = torch.ops.mllm.stream_linear_residual(x, weight, residual)
    assert off_by(summed, residual.float() + product) <= MARGIN * off_by(
        residual + linear(x, weight), residual.float() + product
    )


@pytest.mark.parametrize(("rows", "columns"), [(6144, 1024), (12288, 2048), (28672, 4096)])
def test_a_gated_one_without_a_norm(tmp_path, rows, columns):
    load([LinearKind(rows, columns, gated=True)], tmp_path)
    for num_tokens in (count for count in TOKEN_BUCKETS if is_streamed(rows, columns, count)):
        x, weight = random_inputs([("T", columns), (rows, columns)], num_tokens)
        gate, up = linear(x.float(), weight.float()).chunk(2, -1)
        torch_gate, torch_up = linear(x, weight).chunk(2, -1)
        true = silu(gate) * up
        ours = torch.ops.mllm.stream_linear(x, weight, None, 0.0, True)
        assert off_by(ours, true) <= MARGIN * off_by(silu(torch_gate) * torch_up, true)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 16, 40, 128, 256])
def test_no_bit_of_a_token_depends_on_its_neighbours(tmp_path, num_tokens, gated):
    rows, columns = 6144, 1024
    load([LinearKind(rows, columns, gated=gated)], tmp_path, (num_tokens,))
    x, weight = random_inputs([("T", columns), (rows, columns)], num_tokens)

    def first_of(tokens: torch.Tensor, place: int) -> torch.Tensor:
        return torch.ops.mllm.stream_linear(tokens.roll(place, 0), weight, None, 0.0, gated)[place]

    alone = first_of(x[:1].expand_as(x), 0)
    assert all(torch.equal(first_of(x, place), alone) for place in range(num_tokens))


@pytest.mark.parametrize("count", [8, 140])
@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (6144, 1536)])
def test_an_input_may_be_anywhere(tmp_path, rows, columns, count):
    plain = LinearKind(rows, columns)
    load([plain, replace(plain, residual=True)], tmp_path)
    x, weight = random_inputs([(count, columns + 1), (rows, columns)], count)
    residual = torch.randn(count * rows + 1, device="cuda").bfloat16()[1:].view(count, rows)
    for odd in (x[:, 1:], x.flatten()[1 : 1 + (count - 1) * columns].view(count - 1, columns)):
        ours = torch.ops.mllm.stream_linear(odd, weight, None, 0.0, False)
        assert torch.equal(ours, torch.ops.mllm.stream_linear(odd.clone(), weight, None, 0.0, False))
        beside = residual[: len(odd)]
        ours = torch.ops.mllm.stream_linear_residual(odd, weight, beside)
        assert torch.equal(ours, torch.ops.mllm.stream_linear_residual(odd.clone(), weight, beside.clone()))


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 40, 150])
@pytest.mark.parametrize("shape", [(1024, 2048, 3072), (2560, 4096, 9728)], ids=str)
def test_what_the_kernel_ahead_writes_late_is_waited_for(tmp_path, shape, num_tokens):
    """By all four of a layer, which are on the multiprocessors at the same time where the first lets the others in."""
    hidden, heads, ffn = shape
    load(kinds_of(*shape), tmp_path, (num_tokens,))
    shapes = [
        ("T", heads),
        (hidden, heads),
        ("T", hidden),
        (hidden,),
        (2 * ffn, hidden),
        (hidden, ffn),
        (hidden * 3 // 2, hidden),
    ]
    x, o, residual, norm, gate_up, down, qkv = random_inputs(shapes, num_tokens)

    def layer_of(x: torch.Tensor) -> torch.Tensor:
        h, scaled, squares = torch.ops.mllm.stream_linear_residual_norm(x, o, residual, norm)
        active = torch.ops.mllm.stream_linear(scaled, gate_up, squares, EPS, True)
        _, scaled, squares = torch.ops.mllm.stream_linear_residual_norm(active, down, h, norm)
        return torch.ops.mllm.stream_linear(scaled, qkv, squares, EPS, False)

    want = layer_of(x)
    late = late_kernel(
        "uint4* to, const uint4* from, int count",
        "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];",
    )
    for _ in range(3):
        late_x = torch.full_like(x, torch.nan)
        late.launch(LATE_BLOCKS, 256, (address_of(late_x), address_of(x), ctypes.c_int(x.numel() // 8)))
        assert torch.equal(layer_of(late_x), want)


def test_a_thread_without_a_context_loads_kernels(tmp_path):
    """As an engine does that compiled in the same process: the driver's calls need a context of the thread's own."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(load, [LinearKind(64, 512)], tmp_path).result()
    x, weight = random_inputs([("T", 512), (64, 512)], 4)
    product = linear(x.float(), weight.float())
    ours = torch.ops.mllm.stream_linear(x, weight, None, 0.0, False)
    assert off_by(ours, product) <= MARGIN * off_by(linear(x, weight), product)


def test_a_kernel_that_is_not_loaded_is_named():
    x, weight = random_inputs([("T", 768), (192, 768)], 2)
    with pytest.raises(RuntimeError, match=r"192x768.*load_kernels"):
        torch.ops.mllm.stream_linear(x, weight, None, EPS, False)
