"""The decode kernels for Hopper, as far as they go without a GPU: how they divide, their source, their launches."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from itertools import product

import pytest
import torch

from mllm_compile.errors import ArtifactError
from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.hopper import decoder
from mllm_compile.runtime.attention.hopper.clusters import (
    SPLITS,
    choose_split,
    cluster_kernels,
    left_words,
    parts_per_head,
)
from mllm_compile.runtime.attention.hopper.kernel import MISSING
from mllm_compile.runtime.attention.hopper.rotation import Rotation, _Argument
from mllm_compile.runtime.attention.hopper.shapes import (
    are_served,
    fuses_rope_of_heads,
    kernel_from_json,
    writes_keys_of_heads,
)
from mllm_compile.runtime.attention.hopper.shares import MOST_REQUESTS, ShareKernel
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import DecodeVariant, LayerKernels
from mllm_compile.runtime.attention.split.splits import OF_FEW, OF_MANY
from mllm_compile.runtime.cuda import tensor_maps
from mllm_compile.runtime.cuda.kernel import MULTIPROCESSORS, kernel_source
from mllm_compile.runtime.program.link import link
from mllm_compile.runtime.program.spec import Program
from tests.runtime.compiled_source import check_compiles_without_spilling, compile_source, needs_nvcc
from tests.sample import slow_but_a_sample, slow_but_a_sample_of_each

_MULTIPROCESSOR_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10
_TOKENS_OF_GROUPS = (4, 4), (4, 16), (8, 8), (5, 3)  # in one unit of 16 queries, in four, and in one not full


def test_of_splits_that_are_compiled_the_largest_is_taken_that_leaves_all_blocks_their_place():
    assert choose_split(8, (2, 4)) == 4
    assert choose_split(64, (2, 4)) == 2
    assert choose_split(8, (2,)) == 2


@pytest.mark.parametrize(("num_sequences", "split"), [(8, 8), (16, 8), (17, 4), (32, 4), (33, 2), (64, 2), (1000, 2)])
def test_few_sequences_have_more_blocks_each(num_sequences, split):
    assert choose_split(num_sequences) == split


@pytest.mark.parametrize("group", [1, 4, 8])
def test_what_clusters_leave_fits_and_they_run_side_by_side(group):
    for num_sequences in range(1, 257):
        split = choose_split(num_sequences)
        parts = parts_per_head(num_sequences, split)
        assert parts == 1 or num_sequences * parts * split <= 2 * MULTIPROCESSORS
        assert num_sequences * (parts - 1) * group * 128 * 2 <= left_words(group, [split])
    assert [parts_per_head(8 * count, choose_split(8 * count)) for count in (1, 2, 3, 5, 8, 9, 32)] == [
        3,
        1,
        2,
        3,
        2,
        1,
        1,
    ]


@pytest.mark.parametrize(("page_size", "is_right"), [(8, False), (16, True), (48, False), (64, True), (128, True)])
def test_a_tile_is_of_whole_pages_or_a_page_of_whole_tiles(page_size, is_right):
    assert are_served(32, 8, 128, page_size) is is_right


@pytest.mark.parametrize("group", range(1, 9))
def test_two_blocks_fit_on_a_multiprocessor(group):
    for tokens in range(1, 32 // group + 1):
        for kernel in cluster_kernels(8 * group, 8, 64, tokens=tokens):
            assert 2 * (kernel.shared_bytes + _RESERVED_BYTES) <= _MULTIPROCESSOR_BYTES


@pytest.mark.parametrize(
    ("heads", "head_dim", "are"),
    [((20, 20), 64, True), ((32, 8), 64, True), ((64, 8), 64, False), ((15, 5), 64, False), ((20, 20), 32, False)],
)
def test_heads_of_64_are_served_where_two_of_them_are_as_one_of_128(heads, head_dim, are):
    assert are_served(*heads, head_dim, 64) is are
    assert writes_keys_of_heads(*heads, head_dim) is are
    assert not fuses_rope_of_heads(*heads, head_dim)


def test_names_tell_kernels_apart():
    kernels = [*cluster_kernels(16, 8, 64), *cluster_kernels(32, 8, 64), *cluster_kernels(32, 8, 16)]
    kernels += [ShareKernel(8, 2, 64), ShareKernel(8, 4, 64), ShareKernel(4, 4, 64), ShareKernel(8, 4, 16)]
    kernels += [ShareKernel(8, 4, 16, head_dim=256), ShareKernel(8, 4, 16, together=2)]
    kernels += [*cluster_kernels(16, 8, 64, tokens=2), *cluster_kernels(16, 8, 64, tokens=4)]
    assert len({kernel.name for kernel in kernels}) == len(kernels) == 5 * len(SPLITS) + 6


def test_a_kernel_is_the_same_from_json():
    clusters = *cluster_kernels(16, 8, 64), *cluster_kernels(16, 8, 64, tokens=4)
    for kernel in (*clusters, ShareKernel(8, 2, 64, together=2), ShareKernel(8, 2, 64, head_dim=256)):
        assert kernel_from_json(kernel.to_json()) == kernel


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "heads"),
    [
        *((128, *counts) for counts in ((8, 8), (24, 8), (4, 4), (12, 4), (20, 4), (2, 2), (10, 2), (1, 1))),
        *((256, *counts) for counts in ((4, 4), (16, 4), (2, 2), (1, 1))),
    ],
)
@pytest.mark.parametrize("fp8", [False, True])
def test_blocks_of_shares_fit_on_a_multiprocessor_and_fill_it(head_dim, kv_heads, heads, fp8):
    """A twelfth of the registers for a warp: any more warps, and each would have fewer."""
    for group in range(1, 9):
        kernel = ShareKernel(kv_heads, group, 64, fp8=fp8, head_dim=head_dim)
        blocks = kernel.constants()["BLOCKS"]
        assert kernel.heads == heads
        assert kernel.num_blocks == blocks * MULTIPROCESSORS
        assert blocks * kernel.num_threads == 12 * 32
        assert blocks * (kernel.shared_bytes + _RESERVED_BYTES) <= _MULTIPROCESSOR_BYTES
        assert 120 << 10 <= blocks * kernel.slots * kernel.slot_bytes <= 128 << 10


@needs_nvcc
@pytest.mark.parametrize(
    "kernel",
    slow_but_a_sample_of_each(
        type,
        [
            *(cluster_kernels(8 * group, 8, page_size)[-1] for group in (1, 4, 8) for page_size in (16, 64, 128)),
            *(ShareKernel(kv_heads, group, 64) for kv_heads in (8, 16, 4) for group in (1, 4, 8)),
            *(ShareKernel(kv_heads, 8, 16, fp8=True) for kv_heads in (4, 2)),
            *(ShareKernel(kv_heads, 8, 64, fp8=fp8, head_dim=256) for kv_heads, fp8 in ((4, False), (2, True))),
            cluster_kernels(64, 8, 64, sinks=True)[0],
            *(
                cluster_kernels(8 * group, 8, 16, tokens=tokens)[0]
                for group, tokens in ((4, 4), (4, 16), (8, 8), (5, 3))
            ),
            *(cluster_kernels(32, 8, 16, fp8=True, tokens=tokens)[0] for tokens in (1, 2, 4, 8)),
            ShareKernel(8, 8, 64, sinks=True),
            ShareKernel(10, 2, 64, together=2),
            *cluster_kernels(20, 10, 64, together=2)[:1],
        ],
        1,
    ),
    ids=lambda kernel: kernel.name,
)
def test_the_source_compiles_without_spilling(tmp_path, kernel):
    check_compiles_without_spilling(kernel_source(kernel), tmp_path)


@needs_nvcc
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    slow_but_a_sample(
        product([(8, 1, False), (8, 2, True), (8, 5, False), (8, 8, True), (4, 8, False), (2, 7, True)], [128, 256]), 1
    ),
)
def test_shared_memory_is_what_the_source_lays_out(tmp_path, heads, head_dim):
    kv_heads, group, fp8 = heads
    kernel = ShareKernel(kv_heads, group, 64, fp8=fp8, head_dim=head_dim)
    check = f"static_assert(SLOTS * SLOT_BYTES + 1024 + sizeof(Shared) == {kernel.shared_bytes});\n"
    check += f"static_assert(32 * (WARPS + 1 + PREPARERS) == {kernel.num_threads});\n"
    check += f"static_assert(sizeof(Part) == {4 * kernel.part_floats});\n"
    compile_source(kernel_source(kernel) + check, tmp_path)


class FakeKernel:
    def __init__(self, name: str) -> None:
        self.name = name
        self.launches: list[tuple[int, int, int]] = []
        self.rotations: list[_Argument] = []
        self.sinks: list[int | None] = []

    def launch(self, num_blocks, num_threads, arguments, starts_early) -> None:
        self.starts_early = starts_early
        self.launches.append((num_blocks, num_threads, len(arguments)))
        *_, rotation, sinks = arguments
        self.rotations.append(rotation)
        self.sinks.append(sinks.value)


class FakeMaps:
    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def get(self, matrix: torch.Tensor, *boxes: object):
        self.asked.append((tuple(matrix.shape), *boxes))
        return type("Map", (), {"address": 64})


@pytest.fixture
def made(monkeypatch) -> dict[str, FakeKernel]:
    """The kernels that were loaded, by name."""
    kernels: dict[str, FakeKernel] = {}

    def load(kernel, binaries):
        assert binaries[kernel.name] == b"binary"
        kernels[kernel.name] = FakeKernel(kernel.name)
        return kernels[kernel.name]

    monkeypatch.setattr(decoder, "load_kernel", load)
    monkeypatch.setattr(decoder, "TensorMaps", FakeMaps)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return kernels


def inputs_of(num_requests: int) -> list[torch.Tensor]:
    keys = torch.zeros(160, 8, 128, dtype=torch.bfloat16)
    table, lens = torch.zeros(num_requests, 10, dtype=torch.int32), torch.ones(num_requests, dtype=torch.int32)
    q = torch.zeros(num_requests, 32, 128, dtype=torch.bfloat16)
    return [q, keys, keys, table, lens, torch.empty_like(q), *[torch.empty(0)] * 4]


def test_a_batch_runs_the_kernel_of_its_split_on_the_caches_rows(made):
    kernels = cluster_kernels(32, 8, 16)
    decode = decoder.ClusterDecode(kernels, {kernel.name: b"binary" for kernel in kernels}, 0.1, torch.device("cpu"))
    decode(inputs_of(3))
    assert all(kernel.starts_early for kernel in made.values() if kernel.launches)
    decode(inputs_of(3), starts_early=False)
    assert not any(kernel.starts_early for kernel in made.values() if kernel.launches)
    assert made["clusters_8x4_page16_split4"].launches.pop()
    assert {name: kernel.launches for name, kernel in made.items() if kernel.launches} == {
        "clusters_8x4_page16_split4": [(3 * 8 * 4 * parts_per_head(24, 4), 128, 12)]
    }
    assert decode._maps.asked == [((160, 1024), tensor_maps.rows, 16)] * 4


def test_rows_of_a_request_are_one_clusters(made):
    kernels = cluster_kernels(32, 8, 16, tokens=4)
    decode = decoder.ClusterDecode(kernels, {kernel.name: b"binary" for kernel in kernels}, 0.1, torch.device("cpu"))
    decode(inputs_of(4))
    decode(inputs_of(12))
    assert {name: kernel.launches for name, kernel in made.items() if kernel.launches} == {
        "clusters_8x4_page16_tokens4_split8": [(8 * 8 * 3, 128, 12)],
        "clusters_8x4_page16_tokens4_split4": [(3 * 8 * 4 * 2, 128, 12)],
    }
    assert decode._left.shape == (left_words(16),)


def test_any_batch_is_shared_by_as_many_blocks_except_one_that_the_kernel_cannot_count(made):
    kernel = ShareKernel(8, 4, 16)
    decode = decoder.ShareDecode(kernel, {kernel.name: b"binary"}, 0.1, torch.device("cpu"))
    decode(inputs_of(3))
    decode(inputs_of(MOST_REQUESTS))
    # Binaries of older runtimes were compiled for such a launch: FORMAT_VERSION goes up with any change of it.
    assert made["shares_8x4_page16"].launches == [(132, 384, 12)] * 2
    with pytest.raises(ValueError, match="1025 requests decode; the kernel counts up to 1024"):
        decode(inputs_of(MOST_REQUESTS + 1))
    assert decode._maps.asked == [((160, 1024), tensor_maps.panels, 16, 16)] * 4
    assert decode._parts.shape == (132 * 8 * kernel.part_floats,)
    assert (decode._parts == MISSING).all()


def test_blocks_of_fewer_heads_are_as_many_more(made):
    kernel = ShareKernel(4, 8, 16)
    decode = decoder.ShareDecode(kernel, {kernel.name: b"binary"}, 0.1, torch.device("cpu"))
    q, keys, _, *rest = inputs_of(3)
    decode([q, keys[:, :4], keys[:, :4], *rest])
    assert made["shares_4x8_page16"].launches == [(2 * 132, 192, 12)]
    assert decode._maps.asked == [((160, 512), tensor_maps.panels, 16, 8)] * 2
    assert decode._parts.shape == (2 * 132 * 4 * kernel.part_floats,)


def rope_inputs(num_requests: int, has_norms: bool = True) -> RopeInputs:
    packed = torch.zeros(1, num_requests, (32 + 8) * 128, dtype=torch.bfloat16)
    q, k = (part.unflatten(-1, (-1, 128)) for part in packed.split([32 * 128, 8 * 128], -1))
    v = torch.zeros(1, num_requests, 9, 128, dtype=torch.bfloat16)[:, :, :8]
    angles = torch.zeros(1, num_requests, 128, dtype=torch.bfloat16)
    weights = [torch.ones(128, dtype=torch.bfloat16) for _ in range(2)] if has_norms else []
    return RopeInputs.of([q, k, angles, angles + 1, *weights], v[0], 1e-6)


@pytest.mark.parametrize("has_norms", [True, False])
def test_a_kernel_is_told_where_the_parts_of_a_projection_are(has_norms):
    keys = inputs_of(3)[1]
    told = rope_inputs(3, has_norms)
    values, k_apart = keys + 1, torch.zeros(1, 3, 10, 128, dtype=torch.bfloat16)[:, :, :8]
    told = replace(told, k=k_apart)
    rotation = Rotation(told.q[0], keys, values, told)
    argument = rotation.argument
    assert (rotation.q.data_ptr(), argument.k, argument.v) == tuple(x.data_ptr() for x in (told.q, told.k, told.v))
    assert (argument.q_stride, argument.k_stride, argument.v_stride) == (40 * 64, 10 * 64, 9 * 64)
    assert (argument.cos, argument.sin) == (told.cos.data_ptr(), told.sin.data_ptr())
    assert (argument.keys, argument.values) == (keys.data_ptr(), values.data_ptr())
    assert argument.eps == pytest.approx(1e-6)
    assert (argument.q_weight is None) is (argument.k_weight is None) is not has_norms
    if has_norms:
        assert (argument.q_weight, argument.k_weight) == (told.q_weight.data_ptr(), told.k_weight.data_ptr())


def test_of_queries_that_are_rotated_it_is_told_that_nothing_is_to_be_done():
    q, keys, *_ = inputs_of(3)
    rotation = Rotation(q, keys, keys, None)
    assert rotation.argument.k is None
    assert (rotation.q.data_ptr(), rotation.argument.q_stride) == (q.data_ptr(), 32 * 128 // 2)


def test_heads_that_are_not_in_one_row_are_copied_into_one():
    keys = inputs_of(3)[1]
    told = rope_inputs(3)
    apart = replace(told, q=torch.randn(1, 32, 3, 128).bfloat16().transpose(1, 2))
    rotation = Rotation(apart.q[0], keys, keys, apart)
    assert rotation.q.is_contiguous()
    assert torch.equal(rotation.q, apart.q[0])
    assert rotation.argument.q_stride == 32 * 128 // 2
    assert rotation.argument.k == told.k.data_ptr()


@needs_nvcc
def test_the_kernels_argument_is_laid_out_as_the_source_has_it(tmp_path):
    offsets = "".join(
        f"static_assert(__builtin_offsetof(Rotation, {name}) == {getattr(_Argument, name).offset});\n"
        for name, _ in _Argument._fields_
    )
    check = offsets + f"static_assert(sizeof(Rotation) == {ctypes.sizeof(_Argument)});\n"
    compile_source(kernel_source(ShareKernel(8, 2, 64)) + check, tmp_path)


def test_a_batch_is_decoded_with_queries_that_are_not_rotated(made):
    kernels = (*cluster_kernels(32, 8, 16), ShareKernel(8, 4, 16))
    binaries = {kernel.name: b"binary" for kernel in kernels}
    few = decoder.ClusterDecode(kernels[:-1], binaries, 0.1, torch.device("cpu"))
    many = decoder.ShareDecode(kernels[-1], binaries, 0.1, torch.device("cpu"))
    for decode in (few, many):
        told = rope_inputs(3)
        decode([told.q[0], *inputs_of(3)[1:6]], told)
        decode(inputs_of(3))
        kernel = made["clusters_8x4_page16_split4" if decode is few else "shares_8x4_page16"]
        assert kernel.launches == [(3 * 8 * 4 * 2, 128, 12) if decode is few else (132, 384, 12)] * 2
        assert [rotation.k for rotation in kernel.rotations] == [told.k.data_ptr(), None]
        assert kernel.sinks == [None, None]


def test_kernels_of_sinks_are_given_them_rotating_or_not(made):
    kernels = (*cluster_kernels(32, 8, 16, sinks=True), ShareKernel(8, 4, 16, sinks=True))
    binaries = {kernel.name: b"binary" for kernel in kernels}
    told, sinks = rope_inputs(3), torch.zeros(32, dtype=torch.bfloat16)
    for decode in (
        decoder.ClusterDecode(kernels[:-1], binaries, 0.1, torch.device("cpu")),
        decoder.ShareDecode(kernels[-1], binaries, 0.1, torch.device("cpu")),
    ):
        decode([told.q[0], *inputs_of(3)[1:6], sinks], told)
        decode([*inputs_of(3), sinks])
    launched = {name: kernel.sinks for name, kernel in made.items() if kernel.sinks}
    assert launched == dict.fromkeys(
        ("clusters_8x4_page16_sinks_split4", "shares_8x4_page16_sinks"), [sinks.data_ptr()] * 2
    )


def test_a_program_decodes_by_what_its_variants_name(made):
    layer = LayerSpec("layers.0.attn", 0, 32, 8, 128, 128, 0.088, 0.0, -1, None)
    clusters, shares = cluster_kernels(32, 8, 64), ShareKernel(8, 4, 64)
    variants = (
        DecodeVariant(15, "few", OF_FEW),
        DecodeVariant(256, kernels=clusters),
        DecodeVariant(8192, kernels=(shares,)),
        DecodeVariant(None, "many", OF_MANY),
    )
    layers = layer, replace(layer, name="layers.1.attn", layer_id=1)
    kernels = dict.fromkeys((one.name for one in layers), LayerKernels(decode=variants))
    program = Program((), layers, (), "logits", layer_kernels=kernels)
    cubins = {kernel.name: b"binary" for kernel in program.cuda_kernels()}
    pieces = {"few": list, "many": tuple}
    linked = link(program, pieces, cubins, torch.device("cpu")).layer_kernels
    first, second = (linked[one.name].decode for one in layers)
    assert [(type(one.piece), one.most_sequences, one.splits, one.fuses_rope) for one in first[1:3]] == [
        (decoder.ClusterDecode, 256, None, True),
        (decoder.ShareDecode, 8192, None, True),
    ]
    assert [(one.piece, one.most_sequences, one.splits, one.fuses_rope) for one in (first[0], first[3])] == [
        (list, 15, OF_FEW, False),
        (tuple, None, OF_MANY, False),
    ]
    assert all(ours is theirs for ours, theirs in zip(first, second, strict=True)), "layers that are alike share them"
    assert set(made) == set(cubins)


def test_a_kernel_that_the_runtime_does_not_hold_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with pytest.raises(ArtifactError, match="clusters_8x4_page64_split2; compile"):
        decoder.ClusterDecode(cluster_kernels(32, 8, 64), {}, 0.1, torch.device("cuda:0"))
    with pytest.raises(ArtifactError, match="shares_8x4_page64; compile"):
        decoder.ShareDecode(ShareKernel(8, 4, 64), {}, 0.1, torch.device("cuda:0"))
