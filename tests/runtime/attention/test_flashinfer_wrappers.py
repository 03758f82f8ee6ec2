"""The wrappers of plan groups, from a FlashInfer that only notes its calls (on a GPU:
tests/gpu/test_flashinfer_backend.py)."""

from types import SimpleNamespace

import pytest
import torch

from mllm_compile.runtime.attention.flashinfer import cascade, decode, prefill, wrappers
from mllm_compile.runtime.attention.flashinfer.decode import PlannedGroup, SplitGroup
from mllm_compile.runtime.attention.flashinfer.prefill import GroupPiecePrefill, GroupPrefill
from mllm_compile.runtime.attention.flashinfer.wrappers import GroupWrappers
from mllm_compile.runtime.attention.flashinfer_backend import FlashInferAttnBackend
from mllm_compile.runtime.attention.layer_kernels import LayerKernels
from mllm_compile.runtime.attention.split.split_decode import LinkedDecode
from mllm_compile.runtime.errors import DeviceError
from tests.runtime.attention.attention_cases import make_layer

FULL, WINDOW = make_layer(16, 4, 128), make_layer(16, 4, 128, window_left=20, layer_id=1)
OWN = [LinkedDecode(lambda inputs: None)]


class Library:
    """FlashInfer, as its wrappers are made."""

    __version__ = "0.0"

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        def made(workspace, layout, **options):
            self.asked.append((name, options))
            return SimpleNamespace(is_cuda_graph_enabled=False, plan=self.plan)

        return made

    def plan(self, *args, **options):
        raise RuntimeError("no kernel could be built\nat length")


class Space:
    def __init__(self, device):
        pass

    def adopt(self, wrapper):
        return wrapper

    def planning(self, wrapper):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


@pytest.fixture
def library(monkeypatch) -> Library:
    library = Library()
    monkeypatch.setattr(wrappers, "import_flashinfer", lambda device: library)
    properties = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for module in (cascade, decode, prefill):
        monkeypatch.setattr(module, "PlanSpace", Space)
    return library


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
    with pytest.raises(DeviceError, match=r"no kernel for PlanGroup\(.*: no kernel could be built Install"):
        FlashInferAttnBackend(made())
