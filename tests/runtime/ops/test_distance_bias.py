"""A table of what distances add to logits, in the Triton kernels of decodes and of prompts, against torch's operations.

Through Triton's interpreter, on a CPU: one test runs this file with it (tests/runtime/interpreted.py).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.split.prefill_tiles import list_tiles
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.trace import attention_reference
from tests.runtime.interpreted import interpreted, run_interpreted, starts_the_interpreter, take_loop_bounds

HEADS, KV_HEADS, HEAD_DIM, PAGE, REACH = 6, 2, 16, 8, 20
LENGTHS = (1, 70, 30)  # the second is beyond the reach, and has two splits
SCALE = 0.3


@starts_the_interpreter
def test_the_kernels_do_what_torchs_operations_do_through_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def of_interpreter(monkeypatch):
    take_loop_bounds(monkeypatch)
    return monkeypatch


class Paged:
    """Keys and values of requests in pages, in no order, and a table of what distances add."""

    def __init__(self, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.head_dim = head_dim
        width = -(-max(LENGTHS) // PAGE)
        self.table = torch.randperm(len(LENGTHS) * width).view(len(LENGTHS), width).int()
        slots = (self.table.long()[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
        self.keys, self.values = torch.randn(2, self.table.numel() * PAGE, KV_HEADS, head_dim).to(dtype)
        self.own = [slots[row, :length] for row, length in enumerate(LENGTHS)]
        self.lens = torch.tensor(LENGTHS, dtype=torch.int32)
        self.bias = torch.randn(HEADS, 2 * REACH + 1).to(dtype)

    def expected(self, q: torch.Tensor, row: int) -> torch.Tensor:
        """Attention of the last tokens q [T, H, D] of a request."""
        own = self.own[row]
        whole = torch.cat((q.new_zeros(len(own) - len(q), HEADS, self.head_dim), q))
        keys, values = self.keys[own].to(q.dtype), self.values[own].to(q.dtype)
        out = attention_reference(whole, keys, values, None, SCALE, 0.0, -1, bias=self.bias.to(q.dtype))
        return out[len(own) - len(q) :]


@interpreted
@pytest.mark.parametrize("fetch_first", [False, True])
def test_decodes_add_it(of_interpreter, fetch_first) -> None:
    from mllm_compile.runtime.ops.attention import split_decode

    of_interpreter.setattr(split_decode, "wrap_triton", lambda kernel: kernel)
    paged, count, splits = Paged(), len(LENGTHS), 2
    q = torch.randn(count, HEADS, HEAD_DIM)
    out, partial = torch.empty_like(q), torch.empty(count, splits, HEADS, HEAD_DIM)
    tops, totals = torch.empty(2, count, splits, HEADS)
    done = torch.zeros(count, KV_HEADS, dtype=torch.int32)
    batch = q, paged.keys, paged.values, paged.table, paged.lens
    scratch = partial, tops, totals, done
    split_decode.launch_split_decode(batch, out, scratch, PAGE, splits, SCALE, fetch_first=fetch_first, bias=paged.bias)
    for row in range(count):
        torch.testing.assert_close(out[row : row + 1], paged.expected(q[row : row + 1], row), rtol=1e-4, atol=1e-4)


@interpreted
def test_prompts_add_it(of_interpreter) -> None:
    from mllm_compile.runtime.ops.attention import prefill

    of_interpreter.setattr(prefill, "wrap_triton", lambda kernel: kernel)
    paged, new = Paged(), np.array((1, 40, 30), dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(new)))
    q = torch.randn(int(starts[-1]), HEADS, HEAD_DIM)
    out = torch.empty_like(q)
    tiles = torch.from_numpy(list_tiles(starts, np.array(LENGTHS) - new, 0))
    call = prefill.paged_prefill._init_fn if hasattr(prefill.paged_prefill, "_init_fn") else prefill.paged_prefill
    call(q, paged.keys, paged.values, paged.table, paged.lens, tiles, out, None, paged.bias, PAGE, SCALE, 0)
    for row, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        torch.testing.assert_close(out[start:end], paged.expected(q[start:end], row), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.gpu
def test_kernels_on_a_gpu_add_it_in_bfloat16() -> None:
    paged, count, splits = Paged(64, torch.bfloat16), len(LENGTHS), 2
    new = np.array((1, 40, 30), dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(new)))
    q = torch.randn(int(starts[-1]), HEADS, 64).to(torch.bfloat16)
    first = [int(end) - 1 for end in starts[1:]]  # the last token of each
    cache = [one.cuda() for one in (paged.keys, paged.values, paged.table, paged.lens)]
    out = torch.empty(count, HEADS, 64, dtype=torch.bfloat16, device="cuda")
    partial = torch.empty(count, splits, HEADS, 64, device="cuda")
    tops, totals = torch.empty(2, count, splits, HEADS, device="cuda")
    done, bias = torch.zeros(count, KV_HEADS, dtype=torch.int32, device="cuda"), paged.bias.cuda()
    scratch = partial, tops, totals, done
    options = None, None, bias, PAGE, splits, SCALE, 0.0, -1, False, 0
    op("split_decode")(q[first].cuda(), *cache, out, *scratch, *options)
    of_prompts = torch.empty(len(q), HEADS, 64, dtype=torch.bfloat16, device="cuda")
    tiles = torch.from_numpy(list_tiles(starts, np.array(LENGTHS) - new, 0)).cuda()
    op("paged_prefill")(q.cuda(), *cache, tiles, of_prompts, None, bias, PAGE, SCALE, 0)
    for row, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        exact = paged.expected(q[start:end].float(), row)
        for ours, theirs in ((of_prompts[start:end], exact), (out[row : row + 1], exact[-1:])):
            error = ((ours.float().cpu() - theirs).norm() / theirs.norm()).item()
            print(f"bias by distance, request {row}: off by {error:.4f}")
            assert error < 0.02
