"""The decode kernel of ours against float32, with every feature that a layer may ask of it."""

from __future__ import annotations

import math

import pytest
import torch

from mllm_compile.runtime.attention.split.splits import OF_FEW, OF_MANY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

LENGTHS = [1, 2, 63, 64, 65, 300, 577, 4096]


class Cache:
    """Random pages of several requests, in random order."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.page_size = page_size
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        width = -(-max(lengths) // page_size)
        num_pages = len(lengths) * width
        self.page_table = torch.randperm(num_pages, generator=generator, device="cuda").int().view(len(lengths), width)
        shape = num_pages * page_size, kv_heads, head_dim
        self.keys, self.values = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(2))

    def of_request(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its keys and values in order, float32."""
        positions = torch.arange(int(self.lengths[row]), device="cuda")
        slots = self.page_table[row].long()[positions // self.page_size] * self.page_size + positions % self.page_size
        return self.keys[slots].float(), self.values[slots].float()


def decode(
    cache: Cache,
    q: torch.Tensor,
    num_splits: int,
    *,
    fetch_first: bool,
    soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    import mllm_compile.runtime.ops.attention.split_decode  # noqa: F401  (needs Triton)

    num_requests, num_heads, head_dim = q.shape
    scratch = [
        torch.full((num_requests, num_splits, num_heads, *rest), math.nan, device="cuda")
        for rest in ((head_dim,), (), ())
    ]
    done = torch.zeros(num_requests, cache.keys.shape[1], dtype=torch.int32, device="cuda")
    out = torch.full_like(q, math.nan)
    torch.ops.mllm.split_decode(
        q,
        cache.keys,
        cache.values,
        cache.page_table,
        cache.lengths,
        out,
        *scratch,
        done,
        sinks,
        None,
        None,
        cache.page_size,
        OF_FEW.most if fetch_first else OF_MANY.most,
        head_dim**-0.5,
        soft_cap,
        window_left,
        fetch_first,
        0,
    )
    assert not done.any()
    return out


def in_float32(
    cache: Cache, q: torch.Tensor, soft_cap: float = 0.0, window_left: int = -1, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    results = []
    for row, heads in enumerate(q.float()):
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in cache.of_request(row))
        logits = torch.einsum("hd,lhd->hl", heads, keys) * q.shape[2] ** -0.5
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        if window_left >= 0:
            logits[:, : max(0, logits.shape[1] - 1 - window_left)] = -math.inf
        if sinks is not None:
            logits = torch.cat((logits, sinks.float()[:, None]), -1)
        results.append(torch.einsum("hl,lhd->hd", logits.softmax(-1)[:, : len(keys)], values))
    return torch.stack(results)


@pytest.mark.parametrize("fetch_first", [True, False], ids=["few", "many"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype", "soft_cap", "window_left"),
    [
        (16, 8, 128, 64, torch.bfloat16, 0.0, -1),
        (32, 8, 128, 16, torch.bfloat16, 0.0, -1),
        (8, 8, 64, 64, torch.float16, 0.0, -1),
        (14, 2, 64, 5, torch.bfloat16, 0.0, -1),
        (16, 1, 128, 64, torch.bfloat16, 0.0, -1),
        (8, 4, 256, 64, torch.bfloat16, 50.0, -1),
        (8, 4, 256, 64, torch.bfloat16, 2.0, 100),
        (16, 8, 128, 64, torch.bfloat16, 0.0, 0),
        (16, 8, 128, 64, torch.bfloat16, 0.0, 4095),
    ],
)
def test_numbers_match_float32(heads, kv_heads, head_dim, page_size, dtype, soft_cap, window_left, fetch_first):
    cache = Cache(LENGTHS, kv_heads, head_dim, page_size, dtype)
    q = 2 * torch.randn(len(LENGTHS), heads, head_dim, device="cuda").to(dtype)
    want = in_float32(cache, q, soft_cap, window_left)
    for num_splits in (1, 3, 8):
        got = decode(cache, q, num_splits, fetch_first=fetch_first, soft_cap=soft_cap, window_left=window_left)
        error = ((got.float() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max()
        assert error < 8e-3, f"{num_splits} splits"


def worst_head(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖ of the worst head of any request; sinks make heads of one request large and small."""
    return ((got.float() - want).norm(dim=2) / want.norm(dim=2)).max().item()


@pytest.mark.parametrize("fetch_first", [True, False], ids=["few", "many"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "soft_cap", "window_left"),
    [
        (64, 8, 64, torch.bfloat16, 0.0, 127),
        (64, 8, 64, torch.bfloat16, 0.0, -1),
        (14, 2, 64, torch.float16, 5.0, -1),
        (16, 8, 128, torch.bfloat16, 0.0, 0),
    ],
)
def test_sinks_take_weight_from_all_keys(heads, kv_heads, head_dim, dtype, soft_cap, window_left, fetch_first):
    cache = Cache(LENGTHS, kv_heads, head_dim, 64, dtype)
    q = 2 * torch.randn(len(LENGTHS), heads, head_dim, device="cuda").to(dtype)
    sinks = torch.linspace(-4, 10, heads, device="cuda").to(dtype)
    want = in_float32(cache, q, soft_cap, window_left, sinks)
    for num_splits in (1, 3, 8):
        options = {"soft_cap": soft_cap, "window_left": window_left, "sinks": sinks}
        got = decode(cache, q, num_splits, fetch_first=fetch_first, **options)
        assert worst_head(got, want) < 1e-2, f"{num_splits} splits"


@pytest.mark.parametrize("fetch_first", [True, False], ids=["few", "many"])
def test_a_request_has_the_same_numbers_bitwise_among_any_others(fetch_first):
    lengths = [577, 64, 4096, 1, 300]
    q = torch.randn(len(lengths), 32, 128, device="cuda").bfloat16()
    cache = Cache(lengths, 8, 128, 64, torch.bfloat16)
    together = decode(cache, q, 8, fetch_first=fetch_first)
    order = [3, 2, 0, 4, 1]
    cache.page_table, cache.lengths = cache.page_table[order], cache.lengths[order]
    assert torch.equal(decode(cache, q[order], 8, fetch_first=fetch_first), together[order])
    cache.page_table, cache.lengths = cache.page_table[1:2].contiguous(), cache.lengths[1:2]
    assert torch.equal(decode(cache, q[order][1:2], 8, fetch_first=fetch_first), together[2:3])


@pytest.mark.parametrize("fetch_first", [True, False], ids=["few", "many"])
@pytest.mark.parametrize("window_left", [-1, 100])
def test_rows_without_keys_are_passed_over(fetch_first, window_left):
    lengths = [577, 0, 64, 0]
    cache = Cache([max(1, length) for length in lengths], 8, 128, 64, torch.bfloat16)
    cache.lengths.copy_(torch.tensor(lengths))
    q = torch.randn(len(lengths), 16, 128, device="cuda").bfloat16()
    got = decode(cache, q, 8, fetch_first=fetch_first, window_left=window_left)
    assert got[1::2].isnan().all()  # as `decode` has left them
    want = in_float32(cache, q, window_left=window_left)[::2]
    assert ((got[::2].float() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 8e-3


def test_a_long_request_is_split_among_as_many_blocks_as_there_are():
    cache = Cache([70_000], 2, 128, 64, torch.bfloat16)
    q = torch.randn(1, 8, 128, device="cuda").bfloat16()
    got = decode(cache, q, OF_FEW.most, fetch_first=True).float()
    want = in_float32(cache, q)
    assert (got - want).norm() < 1e-2 * want.norm()
