"""Decodes in one order: a row's bits are the same among any blocks, alone, and with its request's other rows."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch

from mllm_compile.kernels.cuda import can_compile_kernels
from mllm_compile.runtime.attention.split.splits import IN_ORDER
from mllm_compile.runtime.cuda.driver import address_of
from tests.gpu.late_kernels import LATE_BLOCKS, late_kernel
from tests.gpu.test_hopper_decode import LATE_ROWS
from tests.gpu.test_split_decode import Cache, in_float32, worst_head

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

REQUESTS = [(1, 130), (700, 1), (300, 37), (65, 63), (5, 1), (9, 1), (1000, 40), (4000, 3)]  # first length, and rows


def rows_of_requests(requests: list[tuple[int, int]], kv_heads: int, head_dim: int) -> Cache:
    """A cache whose rows are requests' rows, of one length more from each to the next."""
    cache = Cache([first + count for first, count in requests], kv_heads, head_dim, 16, torch.bfloat16)
    owners = torch.tensor([index for index, (_, count) in enumerate(requests) for _ in range(count)], device="cuda")
    lengths = [first + row for first, count in requests for row in range(count)]
    cache.page_table, cache.lengths = cache.page_table[owners].contiguous(), torch.tensor(lengths).int().cuda()
    return cache


def inputs_of(cache: Cache, q: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The op's inputs, an output of NaN last, and scratch."""
    rows, heads, head_dim = q.shape
    scratch = [
        torch.full((rows, IN_ORDER.most, heads, *rest), math.nan, device="cuda") for rest in ((head_dim,), (), ())
    ]
    done = torch.zeros(rows, cache.keys.shape[1], dtype=torch.int32, device="cuda")
    inputs = [q, cache.keys, cache.values, cache.page_table, cache.lengths, torch.full_like(q, math.nan)]
    return inputs, [*scratch, done]


def decode(cache: Cache, q: torch.Tensor, blocks: int, sinks: torch.Tensor | None, soft_cap: float) -> torch.Tensor:
    import mllm_compile.runtime.ops.attention.ordered_decode  # noqa: F401  (needs Triton)

    inputs, scratch = inputs_of(cache, q)
    options = cache.page_size, q.shape[2] ** -0.5, soft_cap, blocks
    torch.ops.mllm.ordered_decode(*inputs, *scratch, sinks, None, *options)
    assert not scratch[-1].any()
    return inputs[-1]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (8, 8, 64), (16, 2, 256), (5, 1, 128)])
@pytest.mark.parametrize("features", [{}, {"soft_cap": 30.0}, {"has_sinks": True}], ids=str)
def test_rows_have_the_same_bits_alone_together_and_among_any_blocks(heads, kv_heads, head_dim, features):
    """Together as a prompt's tokens are in the deterministic mode: the same request's rows follow each other."""
    import mllm_compile.runtime.ops.attention.rows_decode  # noqa: F401  (needs Triton)

    cache = rows_of_requests(REQUESTS, kv_heads, head_dim)
    q = torch.randn(len(cache.lengths), heads, head_dim, device="cuda").bfloat16()
    sinks = torch.randn(heads, device="cuda").bfloat16() if features.get("has_sinks") else None
    soft_cap = features.get("soft_cap", 0.0)
    one_block = decode(cache, q, 1, sinks, soft_cap)
    assert worst_head(one_block, in_float32(cache, q, soft_cap, sinks=sinks)) < 1e-2
    for blocks in (2, 4, 8, 16):
        assert torch.equal(decode(cache, q, blocks, sinks, soft_cap), one_block), f"{blocks} blocks"
    together, _ = inputs_of(cache, q)
    torch.ops.mllm.rows_decode(*together, sinks, None, cache.page_size, head_dim**-0.5, soft_cap)
    assert torch.equal(together[-1], one_block)
    table, lengths = cache.page_table, cache.lengths
    for row in (0, 129, 130, len(q) - 1):
        cache.page_table, cache.lengths = table[row : row + 1].contiguous(), lengths[row : row + 1]
        assert torch.equal(decode(cache, q[row : row + 1], 16, sinks, soft_cap), one_block[row : row + 1]), row


@pytest.mark.skipif(
    not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
)
@pytest.mark.parametrize("blocks", [1, 4, 16])
@pytest.mark.parametrize("requests", [[(577, 1)], [(62, 8)], [(1, 9)], [(1020, 9), (64, 1), (2, 3)]], ids=str)
def test_keys_of_the_same_step_are_read_when_the_kernel_ahead_has_ended(requests, blocks, monkeypatch):
    """In a graph: a step's keys are infinite until a kernel writes them that has let the next one begin before."""
    from mllm_compile.runtime.ops.attention import ordered_decode

    class EarlyLaunch:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: self._kernel[grid](*args, launch_pdl=True, **options)

    cache = rows_of_requests(requests, 8, 128)
    q = torch.randn(len(cache.lengths), 32, 128, device="cuda").bfloat16()
    want = decode(cache, q, 1, None, 0.0)
    monkeypatch.setattr(ordered_decode, "wrap_triton", EarlyLaunch)
    decode(cache, q, blocks, None, 0.0)  # compiles
    last = cache.lengths.long() - 1
    page = cache.page_table.gather(1, (last // cache.page_size)[:, None]).squeeze(1).long()
    slots = page * cache.page_size + last % cache.page_size
    new_keys, new_values = cache.keys[slots], cache.values[slots]
    late = late_kernel(*LATE_ROWS)
    arguments = [address_of(tensor) for tensor in (cache.keys, cache.values, new_keys, new_values, slots)]
    arguments.append(ctypes.c_int(len(slots)))
    inputs, scratch = inputs_of(cache, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.keys.index_fill_(0, slots, torch.inf)
        cache.values.index_fill_(0, slots, torch.inf)
        inputs[-1].fill_(torch.nan)  # no kernel between the next two: it would wait
        late.launch(LATE_BLOCKS, new_keys[0].numel() // 8, arguments)
        ordered_decode.ordered_decode(*inputs, *scratch, None, None, cache.page_size, 128**-0.5, 0.0, blocks)
    for _ in range(3):
        graph.replay()
    assert torch.equal(inputs[-1], want)
