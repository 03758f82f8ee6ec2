"""Decodes whose keys are added up in one order, through Triton's interpreter, on a CPU: the numbers and their bits.

One test runs this file with the interpreter (tests/runtime/interpreted.py). tests/gpu/test_split_decode.py has the
compiled kernels.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mllm_compile.runtime.attention.split.splits import IN_ORDER
from tests.runtime.interpreted import interpreted, run_interpreted, starts_the_interpreter, take_loop_bounds

HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 16, 5
BLOCK = 64  # keys of a product
# (first length, rows) of each request: one product; parts of one, and from 1,025 keys on of two.
REQUESTS = ((1, 1), (63, 3), (1023, 3))
SOFT_CAP = 2.0


@starts_the_interpreter
def test_decodes_in_order_through_the_interpreter() -> None:
    run_interpreted(__file__)


class Batch:
    """Queries of rows, and keys and values in pages, in no order; the last row has no key."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        width = -(-max(first + count for first, count in REQUESTS) // PAGE)
        pages = torch.randperm((len(REQUESTS) + 1) * width).view(-1, width).int()
        owners = [index for index, (_, count) in enumerate(REQUESTS) for _ in range(count)] + [len(REQUESTS)]
        self.table = pages[owners].contiguous()
        self.lengths = torch.tensor([first + row for first, count in REQUESTS for row in range(count)] + [0]).int()
        self.slots = (self.table.long()[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
        self.keys, self.values = torch.randn(2, pages.numel() * PAGE, KV_HEADS, HEAD_DIM)
        self.q = torch.randn(len(owners), HEADS, HEAD_DIM)
        self.sinks, self.slopes = torch.randn(HEADS), torch.rand(HEADS) / 10

    def of(self, rows: list[int]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, tuple[Any, ...]]:
        """Inputs, an output of NaN, and features, of these rows."""
        q = self.q[rows]
        batch = q, self.keys, self.values, self.table[rows].contiguous(), self.lengths[rows]
        return batch, torch.full_like(q, math.nan), (self.sinks, self.slopes, PAGE, HEAD_DIM**-0.5, SOFT_CAP)

    def expected(self) -> torch.Tensor:
        out = torch.full_like(self.q, math.nan)
        for row, length in enumerate(self.lengths[:-1].tolist()):
            slots = self.slots[row, :length]
            keys, values = (one[slots].repeat_interleave(3, 1) for one in (self.keys, self.values))
            logits = torch.einsum("hd,lhd->hl", self.q[row], keys) * HEAD_DIM**-0.5
            logits = SOFT_CAP * torch.tanh(logits / SOFT_CAP)
            logits = logits + self.slopes[:, None] * (torch.arange(length) - (length - 1))
            weights = torch.cat((logits, self.sinks[:, None]), 1).softmax(1)[:, :length]
            out[row] = torch.einsum("hl,lhd->hd", weights, values)
        return out


@pytest.fixture
def kernels(monkeypatch):
    from mllm_compile.runtime.ops.attention import ordered_decode, rows_decode

    take_loop_bounds(monkeypatch)
    for module in (ordered_decode, rows_decode):
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel)
    return ordered_decode, rows_decode


def ordered(kernels: Any, batch: Batch, rows: list[int], blocks: int) -> torch.Tensor:
    """The output of these rows. Scratch begins as NaN, so a read of what none wrote shows."""
    inputs, out, features = batch.of(rows)
    scratch = [torch.full((len(rows), IN_ORDER.most, HEADS, *rest), math.nan) for rest in ((HEAD_DIM,), (), ())]
    done = torch.zeros(len(rows), KV_HEADS, dtype=torch.int32)
    kernels[0].ordered_decode(*inputs, out, *scratch, done, *features, blocks)
    assert not done.any()
    return out


@interpreted
def test_bits_of_a_row_go_by_its_length_alone(kernels) -> None:
    """Rows of a request together have the numbers: here their products are numpy's, whose bits go by their size."""
    batch = Batch()
    rows = list(range(len(batch.q)))
    one_block = ordered(kernels, batch, rows, 1)
    torch.testing.assert_close(one_block, batch.expected(), rtol=1e-5, atol=1e-5, equal_nan=True)
    for blocks in (8, 16):
        assert torch.equal(ordered(kernels, batch, rows, blocks).nan_to_num(), one_block.nan_to_num()), blocks
    for row in (0, 6):  # alone
        assert torch.equal(ordered(kernels, batch, [row], 16), one_block[row : row + 1]), row
    inputs, together, features = batch.of(rows)
    kernels[1].rows_decode(*inputs, together, *features)
    torch.testing.assert_close(together, one_block, rtol=1e-6, atol=1e-6, equal_nan=True)
