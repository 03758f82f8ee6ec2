"""The linears in few bits for few tokens on Hopper, as far as they go without one: how they are divided, and their
source."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mllm_compile.errors import ArtifactError
from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, kernel_source
from mllm_compile.runtime.ops import family
from mllm_compile.runtime.ops.stream_linear.linear import TOKEN_BUCKETS, bucket_of
from mllm_compile.runtime.ops.stream_linear.shapes import is_head
from mllm_compile.runtime.ops.stream_linear.streamed_ops import LoadedLinear
from mllm_compile.runtime.ops.stream_quantised import few, tiles
from mllm_compile.runtime.ops.stream_quantised.linear import GROUP, QuantisedKind, kind_of_weight
from mllm_compile.runtime.ops.stream_quantised.ops import STREAMED
from mllm_compile.runtime.ops.stream_quantised.shapes import (
    BUCKETS,
    choose_tiling,
    is_streamed,
    most_tokens,
    tiling_from_json,
)
from mllm_compile.runtime.quantised import scheme
from mllm_compile.runtime.quantised.scheme import WeightScheme
from tests.runtime.compiled_source import check_compiles_without_spilling, needs_nvcc
from tests.sample import slow_but_a_sample_of_each

_SHARED_BYTES = 227 << 10  # of a block on an H200
FP8 = {"group": 0}
FP8_GROUPS = {"group": GROUP}
INT4 = {"values": "int4", "group": GROUP, "scales": "bfloat16"}
INT4_ZEROS = {"values": "int4", "group": GROUP, "scales": "float16", "zeros": True}
MXFP4 = {"values": "mxfp4", "group": 32, "scales": "uint8"}
NVFP4 = {"values": "nvfp4", "group": 16, "scales": "float8_e4m3fn"}
FORMS = [FP8, FP8_GROUPS, INT4, INT4_ZEROS, MXFP4, NVFP4]


def kinds(max_rows: int, columns: tuple[int, int]) -> st.SearchStrategy[QuantisedKind]:
    """Of up to `max_rows` x 64 rows, and columns of that range x 128, of four bits multiples of 512."""
    return st.builds(
        lambda form, columns, **others: QuantisedKind(
            columns=max(columns // 4, 1) * 512 if form not in (FP8, FP8_GROUPS) else columns * 128, **others, **form
        ),
        form=st.sampled_from(FORMS),
        rows=st.integers(1, max_rows).map(lambda n: 64 * n),
        columns=st.integers(*columns),
        norm_blocks=st.sampled_from([0, 64]),
        gated=st.booleans(),
        residual=st.booleans(),
        bias=st.booleans(),
    )


HEADS = kinds(4096, (1, 64)).filter(lambda kind: is_head(kind.rows) and not kind.residual)
KINDS = kinds(128, (1, 64)) | kinds(1023, (1, 224))


@given(KINDS, st.sampled_from([few.FEWEST_TOKENS, few.MAX_TOKENS]))
def test_few_tokens_divide_into_pieces_that_fit_beside_the_next_kernels(kind, tokens):
    both = [replace(kind, residual=residual) for residual in (kind.residual, not kind.residual)]
    assume(tokens == few.FEWEST_TOKENS or all(few.takes(kind, tokens) for kind in both))
    tiling, other = (few.choose(kind, tokens) for kind in both)
    assert tiling.needed_bytes <= tiling.shared_bytes
    assert tiling.shared_bytes + other.shared_bytes + 2048 <= 228 << 10
    assert not kind.residual or 2 * (tiling.shared_bytes + 1024) > 228 << 10, "one on a multiprocessor"
    assert tiling.stages >= 2
    assert tiling.num_blocks <= MULTIPROCESSORS, "all at once"
    assert tiling.clusters <= kind.rows // 16
    assert kind.columns % (tiling.split * kind.panel) == 0
    assert not kind.zeros or kind.columns // tiling.split // GROUP % 4 == 0, "of a copy"
    of_pass = math.ceil(kind.columns / tiling.split / tiling.piece / tiling.passes) * tiling.piece
    assert of_pass * tiling.split * tiling.passes >= kind.columns
    assert tokens * kind.values_a_byte * tiling.steps <= 64, "registers of inputs"


@given(HEADS)
def test_a_head_of_few_tokens_divides_into_pieces_that_fill_a_multiprocessor(kind):
    tiling = few.choose(kind, few.FEWEST_TOKENS)
    assert tiling.shared_bytes == tiling.needed_bytes <= _SHARED_BYTES
    assert tiling.stages >= 2
    assert tiling.num_blocks <= MULTIPROCESSORS, "all at once"
    assert not few.takes(kind, few.MAX_TOKENS), "tiles are"


@given(KINDS | HEADS, st.sampled_from([tokens for tokens in BUCKETS if tokens > few.MAX_TOKENS]))
def test_more_tokens_divide_into_tiles_that_fit(kind, tokens):
    assume(is_streamed(kind, tokens))
    tiling = tiles.choose(kind, tokens)
    assert tiling.rows % 16 == 0
    assert tiling.rows <= 256, "of a box"
    assert kind.columns % (kind.panel * tiling.split * tiling.panels) == 0
    assert tiling.panels * kind.panel // GROUP % tiling.column_groups == 0, "a warp has groups of every stage"
    assert tiling.num_threads <= 512, "or 160 registers are more than there are"
    assert tiling.shared_bytes <= _SHARED_BYTES
    assert min(3 if tokens <= 64 else 2, tiling.steps) <= tiling.stages <= tiling.steps
    assert tiling.num_blocks <= MULTIPROCESSORS, "all at once"
    if tiling.split > 1:
        assert tiling.num_blocks == tiling.num_tiles * tiling.split, "one tile a cluster"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (24576, 4096), (1024, 3072), (64, 512), (151936, 4096)])
def test_weights_of_whole_panels_are_streamed(rows, columns, form):
    kind = QuantisedKind(rows, columns, **form)
    assert [tokens for tokens in BUCKETS if is_streamed(kind, tokens)] == [
        8,
        16,
        32,
        64,
        *([128] if kind.group else []),
    ]
    assert not is_streamed(kind, most_tokens(kind) + 1)


@pytest.mark.parametrize(
    "kind",
    [
        QuantisedKind(4100, 1024),
        QuantisedKind(1024, 192),
        QuantisedKind(151904, 4096),
        QuantisedKind(4096, 65536),
        QuantisedKind(1024, 1024, group=64),
        QuantisedKind(1024, 1024, group=GROUP, scales="bfloat16"),
        QuantisedKind(1024, 896, **INT4),
        QuantisedKind(1024, 768, **INT4_ZEROS),
        QuantisedKind(1024, 1024, values="int4", group=32, scales="bfloat16"),
        QuantisedKind(1024, 1024, values="int4", scales="bfloat16"),
        QuantisedKind(1024, 1024, values="int4", group=GROUP),
        QuantisedKind(1024, 896, **MXFP4),
        QuantisedKind(1024, 1024, values="nvfp4", group=32, scales="float8_e4m3fn"),
    ],
    ids=lambda kind: kind.name,
)
def test_what_does_not_divide_and_other_scales_are_left_alone(kind):
    assert not is_streamed(kind, 8)


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        (WeightScheme("fp8", 1024), FP8),
        (WeightScheme("fp8", 128), FP8_GROUPS),
        (WeightScheme("int4", 128, torch.bfloat16), INT4),
        (WeightScheme("int4", 128, torch.float16, has_zeros=True), INT4_ZEROS),
        (scheme.MXFP4, MXFP4),
        (scheme.NVFP4, NVFP4),
    ],
)
def test_a_weights_kind_is_told_by_its_tensors(weight, kind):
    tensors = [torch.empty(weight.shape(role, 64, 1024), dtype=weight.dtype(role)) for role in weight.roles]
    assert kind_of_weight(*tensors, *[None] * (3 - len(tensors))) == QuantisedKind(64, 1024, **kind)


def test_names_tell_kernels_apart():
    kinds = [
        QuantisedKind(64, 256),
        QuantisedKind(64, 256, 8),
        QuantisedKind(64, 256, gated=True),
        QuantisedKind(64, 256, residual=True),
        QuantisedKind(64, 256, residual=True, next_blocks=4),
        QuantisedKind(64, 256, residual=True, next_blocks=4, plus_one=True),
        QuantisedKind(64, 256, bias=True),
        QuantisedKind(64, 256, squared_relu=True),
    ]
    kinds = [QuantisedKind(**{**vars(kind), "columns": 512, **form}) for kind in kinds for form in FORMS]
    tilings = [choose_tiling(kind, tokens) for kind in kinds for tokens in BUCKETS]
    assert len({tiling.name for tiling in tilings}) == len(tilings)


@given(KINDS)
def test_a_tiling_is_stored_with_all_that_its_launch_takes(kind):
    for tokens in (count for count in BUCKETS if is_streamed(kind, count)):
        tiling = choose_tiling(kind, tokens)
        assert tiling_from_json(json.loads(json.dumps(tiling.to_json()))) == tiling


def test_a_kernel_that_the_runtime_does_not_hold_is_named(driver):
    driver()
    with pytest.raises(ArtifactError, match="fp8_64x256_norm0_t8; compile"):
        STREAMED.load_kernels([choose_tiling(QuantisedKind(64, 256), 8)], {}, torch.device("cuda:0"))


COMPILED = [
    (QuantisedKind(24576, 4096, 256, gated=True, group=group), tokens) for group in (0, GROUP) for tokens in (8, 32)
]
COMPILED += [(QuantisedKind(4096, 12288, residual=True, next_blocks=256, group=GROUP), tokens) for tokens in (8, 16)]
COMPILED += [(QuantisedKind(4096, 12288, residual=True, next_blocks=256, plus_one=True), tokens) for tokens in (8, 64)]
COMPILED += [(QuantisedKind(896, 4864, residual=True, group=GROUP), tokens) for tokens in (8, 16)]
COMPILED += [(QuantisedKind(1152, 896, 56, bias=True, squared_relu=True), tokens) for tokens in (8, 16)]
COMPILED += [
    (kind, tokens)
    for form in (INT4, INT4_ZEROS)
    for kind in (
        QuantisedKind(24576, 4096, 256, gated=True, **form),
        QuantisedKind(4096, 12288, residual=True, next_blocks=256, **form),
    )
    for tokens in (8, 16, 64)
]
COMPILED += [(QuantisedKind(2560, 9728, residual=True, **INT4), 32)]
COMPILED += [(QuantisedKind(24576, 4096, 256, gated=True, **FP8_GROUPS), tokens) for tokens in (64, 128)]
COMPILED += [(QuantisedKind(4096, 12288, residual=True, next_blocks=256, **INT4_ZEROS), 128)]
COMPILED += [(QuantisedKind(24576, 4096, 256, gated=True, **MXFP4), 64)]
COMPILED += [(QuantisedKind(151936, 4096, 256, **form), tokens) for form in (FP8, INT4) for tokens in (8, 16, 64)]
COMPILED += [(QuantisedKind(4096, 12288, residual=True, next_blocks=256, **NVFP4), tokens) for tokens in (16, 64, 128)]
COMPILED += [
    (QuantisedKind(2560, 9728, residual=True, **INT4), 8),
    (QuantisedKind(1152, 512, 56, bias=True, **INT4), 8),
]


@needs_nvcc
@pytest.mark.parametrize(
    ("kind", "tokens"),
    slow_but_a_sample_of_each(lambda one: type(choose_tiling(*one)), COMPILED, 1),  # of each source
    ids=lambda value: getattr(value, "name", None),
)
def test_the_source_compiles_without_spilling(tmp_path, kind, tokens):
    check_compiles_without_spilling(kernel_source(choose_tiling(kind, tokens)), tmp_path)


@pytest.mark.parametrize(
    ("kind", "num_tokens", "boxes"),
    [
        (QuantisedKind(4096, 4096, residual=True), 5, [(tensor_maps.panels, 16, 8)]),
        (QuantisedKind(24576, 4096, gated=True), 1, [(tensor_maps.halves, 16, 8)]),
        (QuantisedKind(24576, 4096, gated=True), 13, [(tensor_maps.halves, 16, 8)]),
        (QuantisedKind(24576, 4096, gated=True), 29, [(tensor_maps.halves, 192, 2), (tensor_maps.rows, 29)]),
    ],
)
def test_a_launch_reads_the_boxes_of_its_tiling(driver, monkeypatch, kind, num_tokens, boxes):
    """Values as elements of two bytes; x by TMA where it comes by boxes too."""
    driver()
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(tensor_maps.TensorMaps, "get", lambda self, matrix, *boxes: asked.append((matrix, *boxes)))
    tiling = choose_tiling(kind, bucket_of(num_tokens))
    loaded = LoadedLinear(tiling, {tiling.name: b"binary"})
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(loaded._loaded, "launch", lambda *arguments: launches.append(arguments))
    x = torch.zeros(num_tokens, kind.columns, dtype=torch.bfloat16)
    values = torch.zeros(kind.rows, kind.columns, dtype=torch.float8_e4m3fn)
    loaded(x, (values, torch.zeros(kind.rows, 1), None), [None] * 6, 0.0, num_tokens)
    assert [tuple(of) for _, *of in asked] == boxes
    assert asked[0][0].shape == (kind.rows, kind.columns // 2)
    assert launches[0][:2] == (tiling.num_blocks, tiling.num_threads)


class StandIn:
    """In place of a kernel: leaves what depends on all that a token has, and notes how many tokens it was given."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def __call__(self, x, weight, operands, eps, num_tokens) -> None:
        self._counts.append(num_tokens)
        squares, residual, of_outputs, out, scaled, out_squares = (
            one if one is None or one.dim() == 1 else one.view(num_tokens, -1) for one in operands
        )
        sums = x.view(num_tokens, -1).sum(-1, keepdim=True) + eps + of_outputs
        out.copy_(
            sums + (0 if squares is None else squares.sum(-1, keepdim=True)) + (0 if residual is None else residual)
        )
        if scaled is not None:
            scaled.copy_(2 * out)
            out_squares.copy_(3 * out[:, : out_squares.shape[1]])


@pytest.mark.parametrize("num_tokens", [128, 129, 200, 256])
@pytest.mark.parametrize("leaves_norm", [False, True])
def test_a_step_of_more_tokens_than_a_launch_takes_is_two(monkeypatch, num_tokens, leaves_norm):
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 8, shape, generator=generator).bfloat16()  # whose sums are exact

    weight = torch.zeros(64, 128, dtype=torch.uint8), torch.zeros(64, 2, dtype=torch.bfloat16), None
    x, of_outputs = random(1, num_tokens, 256) // 8, random(64)
    if leaves_norm:
        kind, run, operands = (
            STREAMED.residual_kind(weight, True),
            STREAMED._residual_norm,
            (random(1, num_tokens, 64), of_outputs),
        )
    else:
        squares = random(1, num_tokens, 4).float()
        kind, run, operands = (
            STREAMED.plain_kind(weight, squares, False, True, False),
            STREAMED._plain,
            (squares, 1.0, False, of_outputs),
        )
    counts: list[int] = []
    monkeypatch.setattr(STREAMED, "_loaded", {(-1, kind, bucket): StandIn(counts) for bucket in TOKEN_BUCKETS})
    parts = run(x, *weight, *operands)
    assert counts == ([128, num_tokens - 128] if num_tokens > 128 else [num_tokens])
    monkeypatch.setattr(STREAMED, "launch_tokens", 256)
    whole = run(x, *weight, *operands)
    assert counts[-1] == num_tokens
    for one, other in zip(parts, whole, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_kernels_are_of_a_launch_and_the_check_runs_a_step_of_several(form):
    kind = QuantisedKind(1024, 1024, **form)
    most = most_tokens(kind)
    assert most == (64 if form is FP8 else 128 if form is FP8_GROUPS else 256)
    assert is_streamed(kind, most)
    assert not is_streamed(kind, most + 1)
    kernels = [choose_tiling(kind, tokens) for tokens in BUCKETS if tokens <= most]
    assert family("stream_quantised").step_sizes(kernels) == sorted({*(one.tokens for one in kernels), most})
    assert family("stream_quantised").step_sizes(kernels[:2]) == [8, 16]
