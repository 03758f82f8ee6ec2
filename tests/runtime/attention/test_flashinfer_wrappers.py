"""The wrappers of plan groups, from a FlashInfer that only notes its calls (on a GPU:
tests/gpu/test_flashinfer_backend.py)."""

import pytest
import torch

from mllm_compile.runtime.attention.flashinfer.decode import PlannedGroup, SplitGroup
from mllm_compile.runtime.attention.flashinfer.prefill import GroupPiecePrefill, GroupPrefill
from mllm_compile.runtime.attention.flashinfer.wrappers import GroupWrappers
from mllm_compile.runtime.attention.flashinfer_backend import FlashInferAttnBackend
from mllm_compile.runtime.attention.layer_kernels import LayerKernels
from mllm_compile.runtime.attention.split.split_decode import LinkedDecode
from mllm_compile.runtime.errors import DeviceError
from tests.runtime.attention.attention_cases import make_layer
from tests.runtime.attention.torch_flashinfer import library

__all__ = ["library"]

FULL, WINDOW = make_layer(16, 4, 128), make_layer(16, 4, 128, window_left=20, layer_id=1)
OWN = [LinkedDecode(lambda inputs: None)]


def made(**options) -> GroupWrappers:
    return GroupWrappers(
        [FULL, WINDOW],
        kv_cache_dtype=torch.bfloat16,
        q_dtype=torch.bfloat16,
        max_context_len=64,
        req_to_token=torch.zeros(3, 64, dtype=torch.int32),
        device="cpu",
        max_requests=2,
        page_size=16,
        **options,
    )


def kinds(things) -> list[type]:
    return [type(thing) for thing in things]


def test_flashinfer_serves_all_groups_of_a_program_without_kernels_and_cascades_those_without_a_window(library):
    groups = made()
    assert groups.group_of == {FULL.name: 0, WINDOW.name: 1}
    assert kinds(groups.decodes) == [PlannedGroup] * 2
    assert kinds(groups.prefills) == [GroupPrefill] * 2
    assert [cascade is None for cascade in groups.cascades] == [False, True]
    assert groups.split_space is None and groups.shared_prefix is None
    decodes = [options for name, options in library.asked if name == "BatchDecodeWithPagedKVCacheWrapper"]
    assert decodes == [{"use_tensor_cores": True}] * 2


def test_kernels_of_the_program_serve_the_groups_that_it_brings_them_for(library):
    piece = OWN[0].piece
    groups = made(
        kernels={WINDOW.name: LayerKernels(decode=OWN, prefill=piece), FULL.name: LayerKernels(cascade=piece)}
    )
    assert kinds(groups.decodes) == [PlannedGroup, SplitGroup]
    assert kinds(groups.prefills) == [GroupPrefill, GroupPiecePrefill]
    assert groups.split_space.page_table.shape == (2, 4)
    assert groups.piece_cascades == {0: piece} and groups.shared_prefix is not None
    backend = object.__new__(FlashInferAttnBackend)
    backend._group_decodes = groups.decodes
    assert backend.get_cuda_graph_seq_len_fill_value() == 1, "FlashInfer takes 0 for a full page"


def test_deterministic_decodes_read_nothing_once_for_all(library):
    assert made(deterministic=True).cascades == [None, None]


def test_a_kernel_that_cannot_be_built_is_told_by_its_group_when_a_backend_loads_them(library):
    library.fails = True
    with pytest.raises(DeviceError, match=r"no kernel for PlanGroup\(.*: no kernel could be built Install"):
        FlashInferAttnBackend(made())
