"""The host's writes into a replay slot (the rest needs a GPU: tests/gpu/test_decode_loop.py)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mllm_compile.runtime.cuda_graph.decode_loop import HostSlot
from mllm_compile.runtime.ops.tokens.replay_slots import REQUEST_FIELDS


@pytest.fixture
def slot(monkeypatch) -> tuple[HostSlot, np.ndarray]:
    """And its memory, with what other steps left there."""
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=list, synchronize=list))
    requests = np.full((6, REQUEST_FIELDS), 99, dtype=np.int32)
    return HostSlot(requests, np.zeros(6, dtype=np.int64)), requests


def test_requests_are_written_with_padding_behind_them_and_no_further(slot):
    slot, requests = slot
    slot.write(np.array([3, 1]), np.array([70, 2], dtype=np.int32), np.array([640, 17]), size=4, padding_len=0)
    assert requests[:, :3].tolist() == [[3, 70, 640], [1, 2, 17], [0, 0, 0], [0, 0, 0], [99] * 3, [99] * 3]
    slot.write(np.array([5]), np.array([9]), np.array([8]), size=1, padding_len=1)
    assert requests[:2, :3].tolist() == [[5, 9, 8], [1, 2, 17]]


def test_inputs_that_are_in_their_places_have_no_row(slot):
    slot, requests = slot
    slot.write_in_place(3)
    assert (requests[:3, 0] < 0).all()
    assert (requests[3:] == 99).all()
