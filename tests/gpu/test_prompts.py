"""The program's own attention on the GPU, with a bias by distance and in chunks, against float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.split.prefill_tiles import list_tiles
from mllm_compile.runtime.attention.split.splits import OF_FEW, OF_MANY
from mllm_compile.runtime.ops.trace import attention_reference
from tests.gpu.test_split_decode import Cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

LENGTHS, NEW = [1, 64, 70, 300, 577, 1100], [1, 64, 3, 300, 200, 130]
# Query heads, KV heads, width, page size, type.
HEADS = [
    (8, 8, 64, 16, torch.bfloat16),
    (10, 2, 128, 64, torch.bfloat16),
    (4, 4, 256, 64, torch.float16),
    (40, 8, 128, 5, torch.bfloat16),
]
KINDS = [(True, 0), (False, 256), (False, 100), (False, 0)]


def slopes_of(num_heads: int) -> torch.Tensor:
    return torch.tensor([2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)], device="cuda")


def in_float32(cache: Cache, q: torch.Tensor, row: int, slopes: torch.Tensor | None, chunk: int) -> torch.Tensor:
    """q: [T, H, D], the last tokens of the request."""
    keys, values = cache.of_request(row)
    whole = torch.cat((q.new_zeros(len(keys) - len(q), *q.shape[1:]), q)).float()
    options = {"alibi_slopes": None if slopes is None else slopes.tolist(), "chunk": chunk}
    return attention_reference(whole, keys, values, None, q.shape[2] ** -0.5, 0.0, -1, **options)[len(keys) - len(q) :]


def prefill(cache: Cache, q: torch.Tensor, new: list[int], slopes: torch.Tensor | None, chunk: int) -> torch.Tensor:
    import mllm_compile.runtime.ops.attention.prefill  # noqa: F401  (needs Triton)

    prefix_lens = cache.lengths.cpu().numpy() - np.array(new)
    tiles = torch.from_numpy(list_tiles(np.cumsum([0, *new]), prefix_lens, 0)).cuda()
    out = torch.full_like(q, math.nan)
    batch = (q, cache.keys, cache.values, cache.page_table, cache.lengths, tiles, out, slopes)
    torch.ops.mllm.paged_prefill(*batch, cache.page_size, q.shape[2] ** -0.5, chunk)
    return out


def decode(
    cache: Cache, q: torch.Tensor, num_splits: int, is_few: bool, slopes: torch.Tensor | None, chunk: int
) -> torch.Tensor:
    import mllm_compile.runtime.ops.attention.split_decode  # noqa: F401  (needs Triton)

    shape = (len(q), num_splits, q.shape[1])
    scratch = [torch.full((*shape, *rest), math.nan, device="cuda") for rest in ((q.shape[2],), (), ())]
    done = torch.zeros(len(q), cache.keys.shape[1], dtype=torch.int32, device="cuda")
    out = torch.full_like(q, math.nan)
    batch = (q, cache.keys, cache.values, cache.page_table, cache.lengths, out, *scratch, done, None, slopes)
    most = (OF_FEW if is_few else OF_MANY).most
    options = (cache.page_size, most, q.shape[2] ** -0.5, 0.0, -1, is_few, chunk)
    torch.ops.mllm.split_decode(*batch, *options)
    return out


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max().item()


@pytest.mark.parametrize(("is_biased", "chunk"), KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "width", "page_size", "dtype"), HEADS)
def test_prompts_match_float32(heads, kv_heads, width, page_size, dtype, is_biased, chunk):
    cache = Cache(LENGTHS, kv_heads, width, page_size, dtype)
    q = 2 * torch.randn(sum(NEW), heads, width, device="cuda").to(dtype)
    slopes = slopes_of(heads) if is_biased else None
    want = torch.cat([in_float32(cache, part, row, slopes, chunk) for row, part in enumerate(q.split(NEW))])
    assert worst(prefill(cache, q, NEW, slopes, chunk), want) < 8e-3


@pytest.mark.parametrize(("is_biased", "chunk"), KINDS[:3])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "page_size", "dtype"), HEADS)
def test_decodes_match_float32(heads, kv_heads, width, page_size, dtype, is_biased, chunk):
    cache = Cache(LENGTHS, kv_heads, width, page_size, dtype)
    q = 2 * torch.randn(len(LENGTHS), heads, width, device="cuda").to(dtype)
    slopes = slopes_of(heads) if is_biased else None
    want = torch.cat([in_float32(cache, q[row, None], row, slopes, chunk) for row in range(len(LENGTHS))])
    for num_splits, is_few in ((1, True), (8, True), (1, False), (8, False)):
        assert worst(decode(cache, q, num_splits, is_few, slopes, chunk), want) < 8e-3
