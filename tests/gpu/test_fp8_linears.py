"""The fp8 linears that stream their weights, compiled as for a runtime, against float32 of the dequantised weights."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, silu

from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.cuda.driver import address_of
from mllm_compile.runtime.ops.stream_fp8.linear import GROUP, Fp8Kind
from mllm_compile.runtime.ops.stream_fp8.ops import load_kernels
from mllm_compile.runtime.ops.stream_fp8.shapes import FP8_BUCKETS, MAX_FP8_TOKENS, choose_tiling, is_streamed
from mllm_compile.runtime.ops.stream_linear.linear import bucket_of
from tests.gpu.late_kernels import LATE_BLOCKS, late_kernel
from tests.gpu.test_few_tokens import EPS, MARGIN, off_by

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

# hidden, all heads, feed-forward: of Qwen3-8B, 4B and 0.6B; odd numbers of panels and of pieces.
SHAPES = [(4096, 4096, 12288), (2560, 4096, 9728), (1024, 2048, 3072), (896, 896, 4864), (512, 1280, 1792)]
NUM_TOKENS = [count for count in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64) if count <= MAX_FP8_TOKENS]
GROUPS = (0, GROUP)
ids = {"ids": lambda value: str(value).replace(" ", "")}


def load(kinds: list[Fp8Kind], folder, buckets: tuple[int, ...] = FP8_BUCKETS) -> None:
    tilings = [choose_tiling(kind, bucket_of(tokens)) for kind in dict.fromkeys(kinds) for tokens in buckets]
    with KernelCompiler() as compiler:
        compiler.write(tilings, folder, NullReporter())
    load_kernels(tilings, {path.stem: path.read_bytes() for path in folder.iterdir()}, torch.device("cuda:0"))


class Weight:
    """A random fp8 weight, with scales of rows or of groups."""

    def __init__(self, rows: int, columns: int, group: int, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        plain = torch.randn(rows, columns // (group or columns), group or columns, generator=generator, device="cuda")
        plain *= torch.rand(*plain.shape[:2], 1, generator=generator, device="cuda") * 0.03 + 0.005
        self.scales = plain.abs().amax(-1) / 448
        self.values = (plain / self.scales.unsqueeze(-1)).view(rows, columns).to(torch.float8_e4m3fn)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values, self.scales

    @property
    def exact(self) -> torch.Tensor:
        values = self.values.float()
        return values * self.scales.repeat_interleave(values.shape[1] // self.scales.shape[1], 1)


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


class Layer:
    """The linears of a layer: o with its residual, gate_up, down, qkv."""

    def __init__(self, shape: tuple[int, int, int], group: int) -> None:
        hidden, heads, ffn = shape
        self.hidden, self.heads = hidden, heads
        sizes = {"o": (hidden, heads), "gate_up": (2 * ffn, hidden), "down": (hidden, ffn), "qkv": (hidden * 2, hidden)}
        self.weights = {name: Weight(*size, group, seed) for seed, (name, size) in enumerate(sizes.items())}
        self.norms = (random(hidden, seed=7) * 0.1 + 1, random(hidden, seed=8) * 0.1 + 1)
        of_residual = Fp8Kind(hidden, heads, residual=True, next_blocks=hidden // 16, group=group)
        self.kinds = [
            of_residual,
            Fp8Kind(2 * ffn, hidden, hidden // 16, gated=True, group=group),
            replace(of_residual, columns=ffn),
            Fp8Kind(hidden * 2, hidden, hidden // 16, group=group),
        ]

    def inputs(self, num_tokens: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
        return random(num_tokens, self.heads, seed=seed), random(num_tokens, self.hidden, seed=seed + 1)

    def ours(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        op, weights = torch.ops.mllm, {name: weight.tensors for name, weight in self.weights.items()}
        h, scaled, squares = op.stream_fp8_linear_residual_norm(x, *weights["o"], residual, self.norms[0])
        active = op.stream_fp8_linear(scaled, *weights["gate_up"], squares, EPS, True)
        h, scaled, squares = op.stream_fp8_linear_residual_norm(active, *weights["down"], h, self.norms[1])
        return h, op.stream_fp8_linear(scaled, *weights["qkv"], squares, EPS, False)

    def torchs(self, x: torch.Tensor, residual: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        weights = {name: weight.exact.to(dtype) for name, weight in self.weights.items()}
        first_norm, second_norm = (norm.to(dtype) for norm in self.norms)
        h = residual.to(dtype) + linear(x.to(dtype), weights["o"])
        gate, up = linear(rms(h, first_norm), weights["gate_up"]).chunk(2, -1)
        h = h + linear(silu(gate) * up, weights["down"])
        return h, linear(rms(h, second_norm), weights["qkv"])


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES, **ids)
def test_a_layers_linears_are_as_near_to_float32_as_torchs(tmp_path, shape, group):
    layer = Layer(shape, group)
    load(layer.kinds, tmp_path)
    for num_tokens in NUM_TOKENS:
        inputs = layer.inputs(num_tokens)
        both = zip(
            layer.ours(*inputs),
            layer.torchs(*inputs, torch.bfloat16),
            layer.torchs(*inputs, torch.float32),
            strict=True,
        )
        for ours, torchs, true in both:
            assert off_by(ours, true) <= MARGIN * off_by(torchs, true), num_tokens


@pytest.mark.parametrize("group", GROUPS)
def test_a_graph_replays_them_on_other_inputs(tmp_path, group):
    layer = Layer(SHAPES[1], group)
    load(layer.kinds, tmp_path)
    for num_tokens in (count for count in (5, 12, 40) if count <= MAX_FP8_TOKENS):
        x, residual = layer.inputs(num_tokens)
        layer.ours(x, residual)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer.ours(x, residual)
        x.copy_(x.flip(1) * 0.5)
        for _ in range(3):
            graph.replay()
        for replayed, direct in zip(captured, layer.ours(x, residual), strict=True):
            assert torch.equal(replayed, direct)


@pytest.mark.parametrize("group", GROUPS)
def test_a_tokens_numbers_are_the_same_in_any_company_of_its_bucket(tmp_path, group):
    layer = Layer(SHAPES[2], group)
    load(layer.kinds, tmp_path)
    for tokens in FP8_BUCKETS:
        x, residual = layer.inputs(tokens)
        together = layer.ours(x, residual)
        fewer = tokens // 2 + 1
        for one, some in zip(layer.ours(x[:fewer], residual[:fewer]), together, strict=True):
            assert torch.equal(one, some[:fewer])


WIDTHS = [(64, 128), (320, 1024), (64, 4096), (1152, 896), (896, 4864), (6144, 1536), (4096, 2304), (3584, 18944)]
WIDTHS += [(4608, 3584), (51200, 5120), (8192, 8192), (2112, 25600)]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("rows", "columns"), WIDTHS)
def test_plain_ones_with_a_bias_and_with_a_residual_for_any_width(tmp_path, rows, columns, group):
    assert is_streamed(rows, columns, MAX_FP8_TOKENS)
    plain, weight = Fp8Kind(rows, columns, group=group), Weight(rows, columns, group)
    load([plain, replace(plain, bias=True), replace(plain, residual=True), replace(plain, gated=True)], tmp_path)
    for num_tokens in (count for count in (1, 3, 8, 11, 16, 20, 50, 64) if count <= MAX_FP8_TOKENS):
        x, residual = random(num_tokens, columns), random(num_tokens, rows, seed=2)
        product, torchs = linear(x.float(), weight.exact), linear(x, weight.exact.bfloat16())
        for bias in (None, residual[0].clone()):
            ours = torch.ops.mllm.stream_fp8_linear(x, *weight.tensors, None, 0.0, False, bias)
            true = product if bias is None else product + bias
            theirs = torchs if bias is None else linear(x, weight.exact.bfloat16(), bias)
            assert off_by(ours, true) <= MARGIN * off_by(theirs, true), num_tokens
        ours, true = torch.ops.mllm.stream_fp8_linear_residual(x, *weight.tensors, residual), residual.float() + product
        assert off_by(ours, true) <= MARGIN * off_by(residual + torchs, true), num_tokens
        ours = torch.ops.mllm.stream_fp8_linear(x, *weight.tensors, None, 0.0, True)
        (gate, up), (torch_gate, torch_up) = product.chunk(2, -1), torchs.chunk(2, -1)
        true = silu(gate) * up
        assert off_by(ours, true) <= MARGIN * off_by(silu(torch_gate) * torch_up, true), num_tokens


@pytest.mark.parametrize("tokens", FP8_BUCKETS)
def test_every_value_counts_as_what_it_is(tmp_path, tokens):
    """All 256 codes, one a column of a row: zeros of both signs and subnormal ones too; NaN counts as 480."""
    kind = Fp8Kind(256, 256)
    load([kind], tmp_path, (tokens,))
    codes = torch.arange(256, device="cuda", dtype=torch.uint8)
    values = (codes[None, :] + codes[:, None]).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.ones(256, 1, device="cuda")
    for begin in range(0, 256, tokens):  # x picks one column each
        x = torch.zeros(tokens, 256, device="cuda", dtype=torch.bfloat16)
        x[torch.arange(tokens), torch.arange(tokens) + begin] = 1
        want = torch.nan_to_num(values.float(), nan=480.0)
        is_negative_nan = values.view(torch.uint8) == 0xFF
        want = torch.where(is_negative_nan, -480.0, want)[:, begin : begin + tokens].T
        assert torch.equal(torch.ops.mllm.stream_fp8_linear(x, values, scales, None, 0.0, False).float(), want)


@pytest.mark.parametrize("tokens", FP8_BUCKETS)
def test_inputs_of_all_sizes_keep_theirs(tmp_path, tokens):
    """x of 2^-100 to 2^60, times a weight of one."""
    kind = Fp8Kind(64, 128)
    load([kind], tmp_path, (tokens,))
    values, scales = torch.ones(64, 128, device="cuda").to(torch.float8_e4m3fn), torch.ones(64, 1, device="cuda")
    for exponent in (-60, -20, 0, 20, 60):
        x = torch.full((tokens, 128), 2.0**exponent, device="cuda", dtype=torch.bfloat16)
        ours = torch.ops.mllm.stream_fp8_linear(x, values, scales, None, 0.0, False)
        assert torch.equal(ours, torch.full_like(ours, 2.0 ** (exponent + 7)))


@pytest.mark.parametrize("group", GROUPS)
def test_an_input_may_lie_anywhere(tmp_path, group):
    rows, columns = 256, 512
    load([Fp8Kind(rows, columns, group=group)], tmp_path)
    weight = Weight(rows, columns, group)
    for count in FP8_BUCKETS:
        x = random(count, columns + 1)
        for odd in (x[:, 1:], x.flatten()[1 : 1 + (count - 1) * columns].view(count - 1, columns)):
            ours, clone = (
                torch.ops.mllm.stream_fp8_linear(one, *weight.tensors, None, 0.0, False) for one in (odd, odd.clone())
            )
            assert torch.equal(ours, clone)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES[:3], **ids)
def test_what_the_kernel_ahead_writes_late_is_waited_for(tmp_path, shape, group):
    layer = Layer(shape, group)
    load(layer.kinds, tmp_path)
    late = late_kernel(
        "uint4* to, const uint4* from, int count",
        "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];",
    )
    for num_tokens in FP8_BUCKETS:
        x, residual = layer.inputs(num_tokens)
        want = layer.ours(x, residual)
        for _ in range(3):
            late_x = torch.full_like(x, torch.nan)
            late.launch(LATE_BLOCKS, 256, (address_of(late_x), address_of(x), ctypes.c_int(x.numel() // 8)))
            for ours, theirs in zip(layer.ours(late_x, residual), want, strict=True):
                assert torch.equal(ours, theirs)


def test_what_is_not_loaded_is_named():
    weight = Weight(192, 768, GROUP)
    with pytest.raises(RuntimeError, match=r"fp8g128_192x768.*load_kernels"):
        torch.ops.mllm.stream_fp8_linear(random(2, 768), *weight.tensors, None, EPS, False)
