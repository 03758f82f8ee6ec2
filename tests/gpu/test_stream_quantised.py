"""The linears in few bits that stream their weights, compiled as for a runtime, against float32 of the dequantised
weights."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, silu

from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.cuda.driver import address_of
from mllm_compile.runtime.ops.stream_linear.linear import bucket_of
from mllm_compile.runtime.ops.stream_quantised.linear import QuantisedKind, kind_of_weight
from mllm_compile.runtime.ops.stream_quantised.ops import STREAMED
from mllm_compile.runtime.ops.stream_quantised.shapes import (
    BUCKETS,
    MAX_TOKENS,
    choose_tiling,
    is_streamed,
    most_tokens,
)
from mllm_compile.runtime.quantised.numbers import dequantised, in_lanes, paired, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4, NVFP4, WeightScheme, third_role
from tests.gpu.late_kernels import LATE_BLOCKS, late_kernel
from tests.gpu.test_few_tokens import EPS, MARGIN, off_by

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

# hidden, all heads, feed-forward: of Qwen3-8B, 4B and 0.6B; odd numbers of panels and of pieces.
LARGE, MIDDLE, SMALL = (4096, 4096, 12288), (2560, 4096, 9728), (1024, 2048, 3072)
SHAPES = [LARGE, MIDDLE, SMALL, (896, 896, 4864), (512, 1280, 1792)]
NUM_TOKENS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 128, 129, 200, 256)
SCHEMES = {
    "fp8 rows": WeightScheme("fp8", 0),  # the group is a row's
    "fp8 groups": WeightScheme("fp8", 128),
    "int4": WeightScheme("int4_lanes", 128, torch.bfloat16),
    "int4 with zero points": WeightScheme("int4_lanes", 128, torch.float16, has_zeros=True),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}
by_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
ids = {"ids": lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value).replace(" ", "_")}


def load(kinds: list[QuantisedKind], folder, most_tokens: int = MAX_TOKENS) -> None:
    tilings = [
        choose_tiling(kind, tokens)
        for kind in dict.fromkeys(kinds)
        for tokens in BUCKETS
        if tokens <= bucket_of(most_tokens)
    ]
    with KernelCompiler() as compiler:
        compiler.write(tilings, folder, NullReporter())
    binaries = {path.stem: path.read_bytes() for path in folder.iterdir()}
    STREAMED.load_kernels(tilings, binaries, torch.device("cuda:0"))


class Weight:
    """A random weight in few bits, of rows and groups of several sizes."""

    def __init__(self, rows: int, columns: int, scheme: WeightScheme, seed: int = 0) -> None:
        scheme = replace(scheme, group=scheme.group or columns)
        generator = torch.Generator("cuda").manual_seed(seed)
        plain = torch.randn(rows, columns // scheme.group, scheme.group, generator=generator, device="cuda")
        plain *= torch.rand(*plain.shape[:2], 1, generator=generator, device="cuda") * 0.03 + 0.005
        if scheme.has_zeros:
            plain += plain.abs().amax(-1, keepdim=True) * 0.3 * torch.randn_like(plain[..., :1])
        made = quantised(plain.view(rows, columns), scheme)
        self.tensors = made["values"], made["scales"], made.get(third_role(scheme.kind))
        self.exact = dequantised(made, scheme.kind, scheme.group, columns, torch.float32)
        self.kind = kind_of_weight(*self.tensors)


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


class Layer:
    """The linears of a layer: o with its residual, gate_up, down, qkv."""

    def __init__(self, shape: tuple[int, int, int], scheme: WeightScheme) -> None:
        hidden, heads, ffn = shape
        self.hidden, self.heads = hidden, heads
        sizes = {"o": (hidden, heads), "gate_up": (2 * ffn, hidden), "down": (hidden, ffn), "qkv": (hidden * 2, hidden)}
        self.weights = {name: Weight(*size, scheme, seed) for seed, (name, size) in enumerate(sizes.items())}
        self.norms = (random(hidden, seed=7) * 0.1 + 1, random(hidden, seed=8) * 0.1 + 1)
        blocks, kinds = hidden // 16, {name: weight.kind for name, weight in self.weights.items()}
        self.kinds = [
            replace(kinds["o"], residual=True, next_blocks=blocks),
            replace(kinds["gate_up"], norm_blocks=blocks, gated=True),
            replace(kinds["down"], residual=True, next_blocks=blocks),
            replace(kinds["qkv"], norm_blocks=blocks),
        ]

    def inputs(self, num_tokens: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
        return random(num_tokens, self.heads, seed=seed), random(num_tokens, self.hidden, seed=seed + 1)

    def ours(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        op, weights = torch.ops.mllm, {name: weight.tensors for name, weight in self.weights.items()}
        h, scaled, squares = op.stream_quantised_linear_residual_norm(x, *weights["o"], residual, self.norms[0])
        active = op.stream_quantised_linear(scaled, *weights["gate_up"], squares, EPS, True)
        h, scaled, squares = op.stream_quantised_linear_residual_norm(active, *weights["down"], h, self.norms[1])
        return h, op.stream_quantised_linear(scaled, *weights["qkv"], squares, EPS, False)

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


CASES = [(shape, name) for shape in SHAPES for name in SCHEMES]
# Of four bits panels have 256 columns, and zero points are copied by fours.
CASES = [(shape, name) for shape, name in CASES if name.startswith("fp8") or shape in (LARGE, MIDDLE, SMALL)]


@pytest.mark.parametrize(("shape", "name"), CASES, **ids)
def test_a_layers_linears_are_as_near_to_float32_as_torchs(tmp_path, shape, name):
    layer = Layer(shape, SCHEMES[name])
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


@by_scheme
def test_a_graph_replays_them_on_other_inputs(tmp_path, scheme):
    layer = Layer(MIDDLE, scheme)
    load(layer.kinds, tmp_path)
    for num_tokens in (5, 12, 40, 150):
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


@by_scheme
def test_a_tokens_numbers_are_the_same_in_any_company_of_its_bucket(tmp_path, scheme):
    layer = Layer(SMALL, scheme)
    load(layer.kinds, tmp_path)
    for tokens in BUCKETS:
        x, residual = layer.inputs(tokens)
        together = layer.ours(x, residual)
        fewer = tokens // 2 + 1
        for one, some in zip(layer.ours(x[:fewer], residual[:fewer]), together, strict=True):
            assert torch.equal(one, some[:fewer])


WIDTHS = [(64, 128), (320, 1024), (64, 4096), (1152, 896), (896, 4864), (6144, 1536), (4096, 2304), (3584, 18944)]
WIDTHS += [(4608, 3584), (51200, 5120), (8192, 8192), (2112, 25600)]
WIDTHS_OF = [
    (rows, columns, name)
    for rows, columns in WIDTHS
    for name in SCHEMES
    if name.startswith("fp8") or columns % (512 if SCHEMES[name].has_zeros else 256) == 0
]


@pytest.mark.parametrize(("rows", "columns", "name"), WIDTHS_OF, **ids)
def test_plain_ones_with_a_bias_and_with_a_residual_for_any_width(tmp_path, rows, columns, name):
    scheme = SCHEMES[name]
    weight = Weight(rows, columns, scheme)
    plain = weight.kind
    assert is_streamed(plain, 64)
    load([plain, replace(plain, bias=True), replace(plain, residual=True), replace(plain, gated=True)], tmp_path)
    for num_tokens in (1, 3, 8, 11, 16, 20, 50, 64, 90):
        margin = MARGIN + 4 * (num_tokens * rows) ** -0.5  # how few numbers are rounded is chance
        x, residual = random(num_tokens, columns), random(num_tokens, rows, seed=2)
        product, torchs = linear(x.float(), weight.exact), linear(x, weight.exact.bfloat16())
        for bias in (None, residual[0].clone()):
            ours = torch.ops.mllm.stream_quantised_linear(x, *weight.tensors, None, 0.0, False, bias)
            true = product if bias is None else product + bias
            theirs = torchs if bias is None else linear(x, weight.exact.bfloat16(), bias)
            assert off_by(ours, true) <= margin * off_by(theirs, true), num_tokens
        ours = torch.ops.mllm.stream_quantised_linear_residual(x, *weight.tensors, residual)
        assert off_by(ours, residual.float() + product) <= margin * off_by(
            residual + torchs, residual.float() + product
        )
        ours = torch.ops.mllm.stream_quantised_linear(x, *weight.tensors, None, 0.0, True)
        (gate, up), (torch_gate, torch_up) = product.chunk(2, -1), torchs.chunk(2, -1)
        true = silu(gate) * up
        assert off_by(ours, true) <= margin * off_by(silu(torch_gate) * torch_up, true), num_tokens


@by_scheme
def test_a_head_is_as_near_to_float32_as_torchs(tmp_path, scheme):
    """As many rows as Qwen3's vocabulary, behind a norm or not."""
    rows, columns = 151936, 1024
    weight = Weight(rows, columns, scheme)
    kinds, most = [weight.kind, replace(weight.kind, norm_blocks=columns // 16)], most_tokens(weight.kind)
    assert is_streamed(weight.kind, most)
    load(kinds, tmp_path, min(most, MAX_TOKENS))
    for num_tokens in (count for count in (1, 8, 9, 16, 33, 64, 90, 128, 200, 256) if count <= most):
        x, squares = random(num_tokens, columns), torch.rand(num_tokens, columns // 16, device="cuda") * 32
        for sums in (None, squares):
            factor = 1.0 if sums is None else torch.rsqrt(sums.sum(-1, keepdim=True) / columns + EPS)
            true = linear(x.float(), weight.exact) * factor
            theirs = (linear(x, weight.exact.bfloat16()).float() * factor).bfloat16()
            ours = torch.ops.mllm.stream_quantised_linear(x, *weight.tensors, sums, EPS, False)
            assert off_by(ours, true) <= MARGIN * off_by(theirs, true), num_tokens


@pytest.mark.parametrize("tokens", BUCKETS)
def test_every_fp8_value_counts_as_what_it_is(tmp_path, tokens):
    """All 256 codes, one a column of a row: zeros of both signs and subnormal ones too; NaN counts as 480."""
    load([QuantisedKind(256, 256)], tmp_path, tokens)
    codes = torch.arange(256, device="cuda", dtype=torch.uint8)
    values = (codes[None, :] + codes[:, None]).to(torch.uint8).view(torch.float8_e4m3fn)
    want = torch.nan_to_num(values.float(), nan=480.0)
    want = torch.where(values.view(torch.uint8) == 0xFF, -480.0, want)
    assert_is_read_as(want, tokens, values, torch.ones(256, 1, device="cuda"), None)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("tokens", BUCKETS)
def test_every_four_bit_value_counts_as_what_it_is(tmp_path, tokens, zeros):
    """All 16 numbers at every place, and all zero points."""
    load([QuantisedKind(256, 512, values="int4", group=128, scales="bfloat16", zeros=zeros)], tmp_path, tokens)
    at = torch.arange(512, device="cuda")[None, :] + torch.arange(256, device="cuda")[:, None]
    numbers, of_groups = at % 16, (at[:, :4] * 3 % 16).to(torch.uint8) if zeros else None
    values = in_lanes(paired(numbers.to(torch.uint8)))
    scales = 2.0 ** (at[:, :4] % 3 - 1)
    zero = 8 if of_groups is None else of_groups.repeat_interleave(128, 1).float()
    want = (numbers - zero) * scales.repeat_interleave(128, 1)
    assert_is_read_as(want, tokens, values, scales.bfloat16(), of_groups)


@pytest.mark.parametrize("kind", [MXFP4, NVFP4], ids=lambda scheme: scheme.kind)
@pytest.mark.parametrize("tokens", BUCKETS)
def test_every_float_of_four_bits_counts_as_what_it_is(tmp_path, tokens, kind):
    """All 16 codes at every place; scales of many sizes, subnormal ones too, beside each other."""
    name = str(kind.scale_dtype).removeprefix("torch.")
    load([QuantisedKind(256, 512, values=kind.kind, group=kind.group, scales=name)], tmp_path, tokens)
    at = torch.arange(512, device="cuda")[None, :] + torch.arange(256, device="cuda")[:, None]
    codes, of_groups = at % 16, at[:, :: kind.group] * 7
    values = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    scales = (of_groups % 127).to(torch.uint8).view(torch.float8_e4m3fn)
    factors = 2.0 ** (at[:, :1] % 5 - 2)
    if kind == MXFP4:
        scales, factors = (of_groups % 100 + 77).to(torch.uint8), None
    weight = {"values": values, "scales": scales, "factors": factors}
    want = dequantised(weight, kind.kind, kind.group, 512, torch.float32)
    assert_is_read_as(want, tokens, values, scales, factors)


def assert_is_read_as(want, tokens, *weight):
    columns = want.shape[1]
    for begin in range(0, columns, tokens):  # x picks one column each
        x = torch.zeros(tokens, columns, device="cuda", dtype=torch.bfloat16)
        x[torch.arange(tokens), torch.arange(tokens) + begin] = 1
        ours = torch.ops.mllm.stream_quantised_linear(x, *weight, None, 0.0, False).float()
        assert torch.equal(ours, want[:, begin : begin + tokens].T)


@by_scheme
def test_inputs_of_all_sizes_keep_theirs(tmp_path, scheme):
    """x of 2^-60 to 2^60, times a weight of one."""
    weight = Weight(64, 512, scheme)
    load([weight.kind], tmp_path)
    values = torch.ones(64, 512, device="cuda").to(torch.float8_e4m3fn)
    zeros = None if weight.tensors[2] is None else torch.full_like(weight.tensors[2], 3)
    if scheme.kind != "fp8":
        values = torch.full((64, 256), 0x99 if zeros is None else 0x44, dtype=torch.uint8, device="cuda")
    scales = torch.ones_like(weight.tensors[1], dtype=torch.float32).to(weight.tensors[1].dtype)
    if scheme.kind in ("mxfp4", "nvfp4"):  # of one, in E2M1
        values, zeros = torch.full_like(values, 0x22), None if zeros is None else torch.ones_like(zeros)
        scales = torch.full_like(scales, 127) if scheme == MXFP4 else scales
    tensors = values, scales, zeros
    for tokens in BUCKETS:
        for exponent in (-60, -20, 0, 20, 60):
            x = torch.full((tokens, 512), 2.0**exponent, device="cuda", dtype=torch.bfloat16)
            ours = torch.ops.mllm.stream_quantised_linear(x, *tensors, None, 0.0, False)
            assert torch.equal(ours, torch.full_like(ours, 2.0 ** (exponent + 9)))


@by_scheme
def test_an_input_may_be_anywhere(tmp_path, scheme):
    rows, columns = 256, 512
    weight = Weight(rows, columns, scheme)
    load([weight.kind], tmp_path)
    for count in BUCKETS:
        x = random(count, columns + 1)
        for odd in (x[:, 1:], x.flatten()[1 : 1 + (count - 1) * columns].view(count - 1, columns)):
            ours, clone = (
                torch.ops.mllm.stream_quantised_linear(one, *weight.tensors, None, 0.0, False)
                for one in (odd, odd.clone())
            )
            assert torch.equal(ours, clone)


@by_scheme
@pytest.mark.parametrize("shape", SHAPES[:3], **ids)
def test_what_the_kernel_ahead_writes_late_is_waited_for(tmp_path, shape, scheme):
    layer = Layer(shape, scheme)
    load(layer.kinds, tmp_path)
    late = late_kernel(
        "uint4* to, const uint4* from, int count",
        "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];",
    )
    for num_tokens in BUCKETS:
        x, residual = layer.inputs(num_tokens)
        want = layer.ours(x, residual)
        for _ in range(3):
            late_x = torch.full_like(x, torch.nan)
            late.launch(LATE_BLOCKS, 256, (address_of(late_x), address_of(x), ctypes.c_int(x.numel() // 8)))
            for ours, theirs in zip(layer.ours(late_x, residual), want, strict=True):
                assert torch.equal(ours, theirs)


def test_a_kernel_that_is_not_loaded_is_named():
    weight = Weight(192, 768, SCHEMES["fp8 groups"])
    with pytest.raises(RuntimeError, match=r"fp8g128_192x768.*load_kernels"):
        torch.ops.mllm.stream_quantised_linear(random(2, 768), *weight.tensors, None, EPS, False)
