"""Where steps are cut, and what their halves are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode, MediaInputs
from mllm_compile.runtime.graph_mode import UBatchSlice
from mllm_compile.runtime.ubatch.slices import most_of_a_part, share_a_request, ubatch_of, ubatch_slices


def batch_of(new: list[int], prefix: list[int] | None = None, **fields: Any) -> ForwardBatch:
    lengths = np.array(new, dtype=np.int32)
    before = np.array(prefix or [0] * len(new), dtype=np.int32)
    count = int(lengths.sum())
    pool: Any = type("Pool", (), {"req_to_token": torch.zeros(8, 64, dtype=torch.int32)})()
    given = {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": len(new),
        "input_ids": torch.arange(count),
        "req_pool_indices": torch.arange(1, len(new) + 1),
        "seq_lens": torch.from_numpy(before + lengths),
        "out_cache_loc": torch.arange(count) + 1000,
        "positions": torch.cat([torch.arange(b, b + n) for b, n in zip(before, lengths, strict=True)]),
        "seq_lens_cpu": torch.from_numpy(before + lengths),
        "req_to_token_pool": pool,
        "token_to_kv_pool": pool,
        "attn_backend": "whole",
        "extend_seq_lens_cpu": torch.from_numpy(lengths),
        "extend_prefix_lens_cpu": torch.from_numpy(before),
    }
    return ForwardBatch(**given | fields)


@pytest.mark.parametrize(
    ("new", "slices"),
    [
        ([8, 8], [(0, 1, 0, 8), (1, 2, 8, 16)]),
        ([7, 9], [(0, 1, 0, 7), (1, 2, 7, 16)]),  # near the middle
        ([3, 13], [(0, 2, 0, 8), (1, 2, 8, 16)]),  # too far from it
        ([16], [(0, 1, 0, 8), (0, 1, 8, 16)]),
        ([1, 1, 14], [(0, 3, 0, 8), (2, 3, 8, 16)]),
        ([5, 5, 6, 4], [(0, 2, 0, 10), (2, 4, 10, 20)]),
    ],
)
def test_a_step_is_cut_between_requests_near_the_middle_or_inside_one(new, slices):
    wanted = tuple(UBatchSlice(slice(*one[:2]), slice(*one[2:])) for one in slices)
    assert ubatch_slices(batch_of(new), 16) == wanted
    assert share_a_request(wanted) == (slices[0][1] > slices[1][0])
    assert all(one[3] - one[2] <= most_of_a_part(sum(new)) for one in slices)


@pytest.mark.parametrize(
    ("new", "fields"),
    [
        ([15], {}),
        ([1] * 16, {"forward_mode": ForwardMode.DECODE}),
        ([*[1] * 12, 8], {"forward_mode": ForwardMode.MIXED}),  # decodes are more than half
        ([16], {"media": MediaInputs(torch.zeros(16, 4), torch.zeros(16, dtype=torch.bool))}),
        ([16], {"mrope_positions": torch.zeros(3, 16, dtype=torch.int64)}),
        ([16], {"adapter_slots": torch.zeros(16, dtype=torch.int32)}),
    ],
)
def test_small_steps_decodes_images_and_adapters_stay_whole(new, fields):
    assert ubatch_slices(batch_of(new, **fields), 16) is None


def test_a_request_in_two_halves_sees_its_earlier_tokens_as_a_prefix():
    batch = batch_of([1, 5, 14], [9, 0, 3], forward_mode=ForwardMode.MIXED, common_prefix_len=4)
    slices = ubatch_slices(batch, 16)
    assert slices is not None
    first, second = (ubatch_of(batch, one, name) for one, name in zip(slices, ("a", "b"), strict=True))  # type: ignore[arg-type]
    assert [first.extend_seq_lens.tolist(), second.extend_seq_lens.tolist()] == [[1, 5, 4], [10]]
    assert [first.extend_prefix_lens.tolist(), second.extend_prefix_lens.tolist()] == [[9, 0, 3], [7]]
    assert [first.seq_lens.tolist(), second.seq_lens_cpu.tolist()] == [[10, 5, 7], [17]]
    assert [first.forward_mode, second.forward_mode] == [ForwardMode.MIXED, ForwardMode.EXTEND]
    assert [first.common_prefix_len, second.common_prefix_len] == [4, 0]
    assert [first.attn_backend, second.attn_backend] == ["a", "b"]
    assert second.req_pool_indices.tolist() == [3]
    for name in ("input_ids", "positions", "out_cache_loc"):
        halves = [getattr(half, name) for half in (first, second)]
        assert torch.equal(torch.cat(halves), getattr(batch, name))
