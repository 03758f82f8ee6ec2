"""Captured decodes of plan groups, which only note what they are told (on a GPU: tests/gpu/test_cuda_graphs.py)."""

import pytest
import torch

from mllm_compile.runtime.attention.captured.decodes import DecodeSteps, make_graph_buffers
from mllm_compile.runtime.attention.flashinfer.decode import DecodeBatch

CPU = torch.device("cpu")


class Group:
    def __init__(self):
        self.buffers = None

    def plan_capture(self, bs, seq_lens, buffers):
        self.buffers = buffers
        return f"captured {bs} rows of {seq_lens.tolist()}"

    def plan_replay(self, bs, decodes):
        return f"replayed {bs} rows of {decodes.seq_lens.tolist()}"


class Space:
    def __init__(self):
        self.listed = []

    def list_pages(self, rows):
        self.listed.append(rows.tolist())


def no_pages(window_left, indices_out):
    raise AssertionError("these groups need no list")


def test_each_group_has_its_capture_and_the_programs_kernels_are_told_whose_pages_they_read():
    groups, space = [Group(), Group()], Space()
    buffers = make_graph_buffers(2, 4, 3, CPU)
    steps = DecodeSteps(groups, space, buffers)
    assert steps.capture(2, torch.tensor([0, 0]), torch.tensor([1, 1])) == ["captured 2 rows of [1, 1]"] * 2
    assert [group.buffers for group in groups] == buffers
    decodes = DecodeBatch(torch.tensor([5, 9]), no_pages)
    assert steps.replay(2, torch.tensor([3, 1]), decodes) == ["replayed 2 rows of [5, 9]"] * 2
    assert space.listed == [[0, 0], [3, 1]]


def test_what_was_not_captured_is_not_replayed():
    steps = DecodeSteps([Group()], None, make_graph_buffers(1, 4, 3, CPU))
    for size in (4, 2):
        steps.capture(size, torch.zeros(size), torch.ones(size))
    with pytest.raises(RuntimeError, match=r"no batch of 3 was captured; captured: \[2, 4\]"):
        steps.replay(3, torch.zeros(3), DecodeBatch(torch.ones(3), no_pages))


def test_a_failed_capture_does_not_count():
    class Refusing(Group):
        def plan_capture(self, bs, seq_lens, buffers):
            raise ValueError("no room")

    steps = DecodeSteps([Refusing()], None, make_graph_buffers(1, 4, 3, CPU))
    with pytest.raises(ValueError, match="no room"):
        steps.capture(2, torch.zeros(2), torch.ones(2))
    with pytest.raises(RuntimeError, match="no batch of 2 was captured"):
        steps.replay(2, torch.zeros(2), DecodeBatch(torch.ones(2), no_pages))


def test_page_lists_are_a_groups_own_and_how_full_last_pages_are_is_all_groups():
    first, second = make_graph_buffers(2, 4, 3, CPU)
    assert first.last_page_len is second.last_page_len
    assert first.kv_indices is not second.kv_indices and first.kv_indptr is not second.kv_indptr
    assert second.kv_indices.tolist() == [0] * 12 and second.kv_indptr.tolist() == [0] * 5
    assert second.kv_indices.dtype == second.kv_indptr.dtype == torch.int32
