"""The Triton kernel of split decodes against a plain softmax in float32, through Triton's interpreter, on a CPU.

One test runs this file with the interpreter (tests/runtime/interpreted.py). tests/gpu/test_split_decode.py has the
compiled kernel, and test_distance_bias.py tables of what distances add.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.runtime.interpreted import interpreted, run_interpreted, starts_the_interpreter, take_loop_bounds

LENGTHS = (1, 290, 0, 64)  # a product takes 64 keys; the row without keys is passed over
HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 16, 5
SCALE = 0.3
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 140},
    "sinks": {"sinks": True},
    "slopes and a cap": {"slopes": True, "soft_cap": 2.0},
    "chunks": {"chunk": 150},  # of the longest request the last 140 keys
    "all": {"window_left": 100, "sinks": True, "slopes": True, "soft_cap": 2.0},
}
# Blocks that keys are split among.
WAYS: dict[str, dict[str, Any]] = {
    "fetched first": {"splits": 1, "fetch_first": True},
    "fetched first, splits": {"splits": 3, "fetch_first": True},
    "one block": {"splits": 1},
    "splits": {"splits": 3},
}


@starts_the_interpreter
def test_the_kernel_is_a_softmax_through_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def kernel(monkeypatch):
    from mllm_compile.runtime.ops.attention import split_decode

    monkeypatch.setattr(split_decode, "wrap_triton", lambda kernel: kernel)
    take_loop_bounds(monkeypatch)
    return split_decode


class Batch:
    """Queries, and keys and values in pages, in no order; sinks and slopes of the query heads."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        width = -(-max(LENGTHS) // PAGE)
        self.table = torch.randperm(len(LENGTHS) * width).view(len(LENGTHS), width).int()
        self.slots = (self.table.long()[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
        self.keys, self.values = torch.randn(2, self.table.numel() * PAGE, KV_HEADS, HEAD_DIM)
        self.q = torch.randn(len(LENGTHS), HEADS, HEAD_DIM)
        self.sinks, self.slopes = torch.randn(HEADS), torch.rand(HEADS) / 10

    def features(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {name: getattr(self, name) if value is True else value for name, value in asked.items()}

    def decode(self, kernel: Any, splits: int, most: int = 8, **options: Any) -> torch.Tensor:
        """The kernel's output. That and its scratch begin as NaN, so a read of what none wrote shows."""
        scratch = [torch.full((len(LENGTHS), splits, HEADS, *rest), math.nan) for rest in ((HEAD_DIM,), (), ())]
        done = torch.zeros(len(LENGTHS), KV_HEADS, dtype=torch.int32)
        out = torch.full_like(self.q, math.nan)
        batch = self.q, self.keys, self.values, self.table, torch.tensor(LENGTHS, dtype=torch.int32)
        kernel.launch_split_decode(batch, out, [*scratch, done], PAGE, most, SCALE, **options)
        assert not done.any()
        return out

    def expected(
        self,
        first: int = 0,
        window_left: int = -1,
        chunk: int = 0,
        soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The softmax [R, H, D] over the keys seen, and the logarithm [R, H] to base 2 of its sum; NaN without keys."""
        out = torch.full_like(self.q, math.nan)
        log_sums = out[:, :, 0].clone()
        for row, length in enumerate(LENGTHS):
            seen = torch.arange(length)
            seen = seen[seen >= first]
            seen = seen[seen >= length - 1 - window_left] if window_left >= 0 else seen
            seen = seen[seen // chunk == (length - 1) // chunk] if chunk else seen
            if not len(seen):
                continue
            keys, values = (one[self.slots[row, seen]].repeat_interleave(3, 1) for one in (self.keys, self.values))
            logits = torch.einsum("hd,lhd->hl", self.q[row], keys) * SCALE
            logits = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
            logits = logits if slopes is None else logits + slopes[:, None] * (seen - (length - 1))
            logits = logits if sinks is None else torch.cat((logits, sinks[:, None]), 1)
            out[row] = torch.einsum("hl,lhd->hd", logits.softmax(1)[:, : len(seen)], values)
            log_sums[row] = logits.logsumexp(1) / math.log(2)
        return out, log_sums


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


@interpreted
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_in_each_way_is_the_softmax(kernel, feature, way) -> None:
    batch = Batch()
    features = batch.features(FEATURES[feature])
    check(batch.decode(kernel, **WAYS[way], **features), batch.expected(**features)[0])


@interpreted
@pytest.mark.parametrize("fetch_first", [False, True])
def test_splits_are_added_up_in_several_turns(kernel, monkeypatch, fetch_first) -> None:
    monkeypatch.setattr(kernel, "_MAX_COMBINED", 2 * 4 * HEAD_DIM)  # two splits at once, of three heads padded to four
    batch = Batch()
    check(batch.decode(kernel, 5, sinks=batch.sinks, fetch_first=fetch_first), batch.expected(sinks=batch.sinks)[0])


@interpreted
@pytest.mark.parametrize(("fetch_first", "splits"), [(False, 1), (True, 3)])
def test_the_rest_behind_shared_keys_comes_with_the_logarithm_of_its_sum(kernel, fetch_first, splits) -> None:
    batch, log_sums = Batch(), torch.full((len(LENGTHS), HEADS), math.nan)
    first = torch.tensor([40], dtype=torch.int32)
    out = batch.decode(kernel, splits, fetch_first=fetch_first, first_keys=first, log_sums=log_sums)
    expected = batch.expected(first=40)
    check(out, expected[0])
    check(log_sums, expected[1])
