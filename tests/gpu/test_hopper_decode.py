"""The decode kernels for Hopper, compiled as for a runtime, against float32."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import pytest
import torch

from mllm_compile.check.decode_attention import _rotated
from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.hopper.clusters import cluster_kernels
from mllm_compile.runtime.attention.hopper.decoder import ClusterDecode, ShareDecode
from mllm_compile.runtime.attention.hopper.kernel import MISSING
from mllm_compile.runtime.attention.hopper.shares import ShareKernel
from mllm_compile.runtime.cuda.driver import address_of
from mllm_compile.runtime.cuda.kernel import CudaKernel, kernel_source
from tests.gpu.late_kernels import LATE_BLOCKS, late_kernel
from tests.gpu.test_split_decode import LENGTHS, Cache, in_float32, worst_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]


Decode = ClusterDecode | ShareDecode
CLUSTERS, SHARES = "clusters", "shares"
# Query heads, KV heads, page size.
HEADS = [
    (16, 8, 64),
    (32, 8, 16),
    (8, 8, 128),
    (64, 8, 32),
    (50, 10, 64),
    (32, 16, 64),
    (40, 8, 64),
    (32, 4, 64),
    (28, 4, 16),
    (12, 12, 64),
    (12, 2, 16),
    (16, 2, 64),
    (8, 1, 64),
]
# The newest keys and values, or any memory in pieces of 16 bytes a thread.
LATE_ROWS = (
    "uint4* keys, uint4* values, const uint4* new_keys, const uint4* new_values, const long long* slots, int num_slots",
    """for (int i = blockIdx.x; i < num_slots; i += gridDim.x) {
    const long long to = slots[i] * blockDim.x + threadIdx.x, from = i * blockDim.x + threadIdx.x;
    keys[to] = new_keys[from], values[to] = new_values[from];
  }""",
)


def compiled_decoder(
    folder: Path, kind: str, heads: int, kv_heads: int, page_size: int, head_dim: int = 128, **features: int
) -> Decode:
    clusters = cluster_kernels(heads, kv_heads, page_size, **features)
    features.pop("of_source", None)
    shares = ShareKernel(kv_heads, heads // kv_heads, page_size, head_dim=head_dim, **features)
    with KernelCompiler() as compiler:
        compiler.write(clusters if kind == CLUSTERS else [shares], folder, NullReporter())
    binaries = {path.stem: path.read_bytes() for path in folder.iterdir()}
    scale = (head_dim // shares.together) ** -0.5
    if kind == CLUSTERS:
        return ClusterDecode(clusters, binaries, scale, torch.device("cuda:0"))
    return ShareDecode(shares, binaries, scale, torch.device("cuda:0"))


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    """By (kind, query heads, KV heads, page size), and head dim and features by name."""

    @cache
    def of(kind: str, heads: int, kv_heads: int, page_size: int, **features: int) -> Decode:
        return compiled_decoder(tmp_path_factory.mktemp("decode"), kind, heads, kv_heads, page_size, **features)

    return of


def decode(
    decoder: Decode, cache: Cache, q: torch.Tensor, out: torch.Tensor | None = None, *sinks: torch.Tensor
) -> torch.Tensor:
    out = torch.full_like(q, torch.nan) if out is None else out
    decoder([q, cache.keys, cache.values, cache.page_table, cache.lengths, out, *sinks])
    return out


def worst_error(decoder: Decode, cache: Cache, heads: int) -> float:
    """‖ours − float32's‖ / ‖float32's‖ of the worst request."""
    q = 2 * torch.randn(len(cache.lengths), heads, cache.keys.shape[2], device="cuda").bfloat16()
    got, want = decode(decoder, cache, q).float(), in_float32(cache, q)
    return ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max().item()


def poison(cache: Cache) -> None:
    """Makes all that is behind the requests' last keys infinite."""
    is_key = torch.zeros(cache.keys.shape[0], dtype=torch.bool, device="cuda")
    for row, length in enumerate(cache.lengths.tolist()):
        positions = torch.arange(length, device="cuda")
        slots = cache.page_table[row].long()[positions // cache.page_size] * cache.page_size
        is_key[slots + positions % cache.page_size] = True
    cache.keys[~is_key] = torch.inf
    cache.values[~is_key] = torch.inf


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 6, 8, 17])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_size"),
    HEADS,
)
@pytest.mark.parametrize("kind", [CLUSTERS, SHARES])
def test_numbers_match_float32(decoders, kind, heads, kv_heads, page_size, num_requests):
    lengths = (LENGTHS * 3)[:num_requests]
    for case in (lengths, lengths[::-1], [640] * num_requests):
        cache = Cache(case, kv_heads, 128, page_size, torch.bfloat16)
        poison(cache)
        assert worst_error(decoders(kind, heads, kv_heads, page_size), cache, heads) < 8e-3


@pytest.mark.parametrize("num_requests", [1, 8, 32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(20, 20), (32, 8), (6, 6)])
@pytest.mark.parametrize("kind", [CLUSTERS, SHARES])
def test_two_heads_of_64_are_taken_as_one(decoders, kind, heads, kv_heads, num_requests):
    cache = Cache((LENGTHS * 5)[:num_requests], kv_heads, 64, 64, torch.bfloat16)
    poison(cache)
    assert worst_error(decoders(kind, heads, kv_heads // 2, 64, together=2), cache, heads) < 8e-3


@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_sources_keys_are_all_there(decoders, num_requests):
    cache = Cache([1500] * num_requests, 20, 64, 64, torch.bfloat16)
    poison(cache)
    assert worst_error(decoders(CLUSTERS, 20, 10, 64, together=2, of_source=True), cache, 20) < 8e-3


@pytest.mark.parametrize(
    ("count", "heads", "kv_heads"),
    [
        *((33, 16, 8), (132, 16, 8), (200, 32, 16), (257, 16, 8), (1024, 16, 8)),
        *((33, 32, 4), (264, 16, 4), (200, 12, 12), (300, 28, 4), (1024, 32, 4)),
        *((40, 16, 2), (600, 12, 2), (1024, 16, 2), (150, 20, 10), (300, 8, 1)),
    ],
)
def test_many_requests_of_any_lengths(decoders, count, heads, kv_heads):
    """A share of several requests, several shares of one, and ends of both at the same key."""
    generator = torch.Generator().manual_seed(count)
    for longest in (16, 40, 700):
        lengths = torch.randint(1, longest + 1, (count,), generator=generator)
        lengths[count // 2] = 1500
        cache = Cache(lengths.tolist(), kv_heads, 128, 64, torch.bfloat16)
        poison(cache)
        assert worst_error(decoders(SHARES, heads, kv_heads, 64), cache, heads) < 8e-3


class New:
    """A new token of each request of a cache, which does not hold its key and value yet: there are infinities."""

    def __init__(self, cache: Cache, heads: int, has_norms: bool, rotates: bool = True) -> None:
        torch.manual_seed(0)
        count, kv_heads, dim = len(cache.lengths), *cache.keys.shape[1:]
        last = cache.lengths.long() - 1
        page = cache.page_table.gather(1, (last // cache.page_size)[:, None]).squeeze(1).long()
        self.slots = page * cache.page_size + last % cache.page_size
        # Projections, then cosines and sines of each token: all that a kernel ahead may write, in one piece of memory.
        width = (heads + 2 * kv_heads) * dim
        self.memory = torch.randn(count, width + 2 * dim, device="cuda").bfloat16().flatten()
        self.packed = self.memory[: count * width].view(1, count, width)
        q, k, v = (
            part.unflatten(-1, (-1, dim))
            for part in self.packed.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        )
        angles = self.memory[count * width :].view(2, 1, count, dim)
        turns = 6 * torch.rand(1, count, dim, device="cuda")
        angles.copy_(torch.stack((turns.cos(), turns.sin())))
        norms = [(1 + torch.rand(dim, device="cuda")).bfloat16() for _ in range(2)] if has_norms else []
        self.rope_inputs = RopeInputs.of([q, k, *(angles.unbind() if rotates else ()), *norms], v[0], 1e-6)
        self.forget(cache)

    def forget(self, cache: Cache) -> None:
        cache.keys.index_fill_(0, self.slots, torch.inf)
        cache.values.index_fill_(0, self.slots, torch.inf)

    def in_float32(self, cache: Cache, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """With the new keys as the kernel has written them."""
        return in_float32(cache, _rotated(self.rope_inputs)[0], sinks=sinks)

    def errors_of_cache(self, cache: Cache) -> tuple[float, bool]:
        """‖keys written − float32's‖ / ‖float32's‖ of the worst request, and whether values are as they were."""
        want = _rotated(self.rope_inputs)[1]
        error = ((cache.keys[self.slots].float() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max().item()
        return error, torch.equal(cache.values[self.slots], self.rope_inputs.v)


def decode_new(decoder: Decode, cache: Cache, new: New, *sinks: torch.Tensor) -> torch.Tensor:
    q = new.rope_inputs.q[0]
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device="cuda")
    decoder([q, cache.keys, cache.values, cache.page_table, cache.lengths, out, *sinks], new.rope_inputs)
    return out


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_size"),
    HEADS,
)
@pytest.mark.parametrize("kind", [CLUSTERS, SHARES])
def test_new_tokens_are_normed_rotated_and_written(decoders, kind, heads, kv_heads, page_size, has_norms):
    compare_new(decoders(kind, heads, kv_heads, page_size), heads, kv_heads, 128, page_size, has_norms, True)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(20, 20, 64), (32, 8, 64), (12, 4, 128)])
@pytest.mark.parametrize("kind", [CLUSTERS, SHARES])
def test_new_tokens_whose_heads_do_not_rotate_are_written(decoders, kind, heads, kv_heads, head_dim):
    together = 128 // head_dim
    decoder = decoders(kind, heads, kv_heads // together, 64, together=together)
    compare_new(decoder, heads, kv_heads, head_dim, 64, False, False)


def compare_new(
    decoder: Decode, heads: int, kv_heads: int, head_dim: int, page_size: int, has_norms: bool, rotates: bool
) -> None:
    """Compares answers, and the cache that they leave, with float32."""
    for lengths in ([1], [577], LENGTHS, LENGTHS[::-1] * 2, [640, 641] * 9, [15, 16, 17] * 40):
        cache = Cache(lengths, kv_heads, head_dim, page_size, torch.bfloat16)
        poison(cache)
        new = New(cache, heads, has_norms, rotates)
        others = torch.ones(len(cache.keys), dtype=torch.bool, device="cuda").index_fill_(0, new.slots, False)
        before = cache.keys[others], cache.values[others]
        got = decode_new(decoder, cache, new).float()
        error, has_values = new.errors_of_cache(cache)
        assert error < 5e-3
        assert has_values
        assert torch.equal(cache.keys[others], before[0])
        assert torch.equal(cache.values[others], before[1])
        want = new.in_float32(cache)
        assert ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 8e-3


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_size", "sinks"),
    [(16, 4, 64, False), (64, 8, 32, True), (16, 2, 16, False), (24, 3, 64, False)],
)
def test_heads_of_256_columns_have_two_warps_each(decoders, heads, kv_heads, page_size, sinks, rotates):
    decoder = decoders(SHARES, heads, kv_heads, page_size, head_dim=256, sinks=sinks)
    given = [torch.linspace(-4, 10, heads, device="cuda").bfloat16()] if sinks else []
    many = torch.randint(1, 700, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    for lengths in ([1], LENGTHS, LENGTHS[::-1] * 2, [15, 16, 17] * 40, [9000, 3], many):
        cache = Cache(lengths, kv_heads, 256, page_size, torch.bfloat16)
        poison(cache)
        if rotates:
            new = New(cache, heads, has_norms=kv_heads != 3)
            got, want = decode_new(decoder, cache, new, *given), new.in_float32(cache, *given)
            error, has_values = new.errors_of_cache(cache)
            assert error < 5e-3
            assert has_values
        else:
            q = 2 * torch.randn(len(lengths), heads, 256, device="cuda").bfloat16()
            got = decode(decoder, cache, q, None, *given)
            assert torch.equal(decode(decoder, cache, q, None, *given), got)
            want = in_float32(cache, q, sinks=given[0] if sinks else None)
        assert ((got.float() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 8e-3
        assert (decoder._parts == MISSING).all()


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "page_size"), [(16, 8, 64), (64, 8, 32), (24, 8, 16), (32, 4, 64)])
@pytest.mark.parametrize("kind", [CLUSTERS, SHARES])
def test_sinks_take_weight_from_all_keys(decoders, kind, heads, kv_heads, page_size, rotates):
    decoder = decoders(kind, heads, kv_heads, page_size, sinks=True)
    sinks = torch.linspace(-4, 10, heads, device="cuda").bfloat16()
    for lengths in ([1], [577], LENGTHS, LENGTHS[::-1] * 2, [640, 641] * 9, [15, 16, 17] * 40):
        cache = Cache(lengths, kv_heads, 128, page_size, torch.bfloat16)
        poison(cache)
        if rotates:
            new = New(cache, heads, has_norms=True)
            got = decode_new(decoder, cache, new, sinks)
            want = new.in_float32(cache, sinks)
        else:
            q = 2 * torch.randn(len(lengths), heads, 128, device="cuda").bfloat16()
            got, want = decode(decoder, cache, q, None, sinks), in_float32(cache, q, sinks=sinks)
        assert worst_head(got, want) < 1.2e-2
        assert worst_head(got, in_float32(cache, _rotated(new.rope_inputs)[0] if rotates else q)) > 0.5, "they are felt"


@pytest.mark.parametrize(("kind", "kv_heads"), [(CLUSTERS, 8), (SHARES, 8), (SHARES, 4), (SHARES, 2)])
def test_new_tokens_have_the_same_numbers_every_time(decoders, kind, kv_heads):
    cache = Cache([3000, 64, 577, 1] * 8, kv_heads, 128, 64, torch.bfloat16)
    new = New(cache, 4 * kv_heads, has_norms=True)
    decoder = decoders(kind, 4 * kv_heads, kv_heads, 64)
    first = decode_new(decoder, cache, new)
    keys = cache.keys.clone()
    for _ in range(20):
        new.forget(cache)
        assert torch.equal(decode_new(decoder, cache, new), first)
        assert torch.equal(cache.keys, keys)


@pytest.mark.parametrize(("kind", "kv_heads"), [(CLUSTERS, 8), (SHARES, 8), (SHARES, 4)])
def test_padding_writes_the_dummy_page_and_nothing_else(decoders, kind, kv_heads):
    """Rows behind the batch's, as a graph has them where other layers need a key: all with the same one."""
    cache = Cache([577, 64, 1, 1, 1], kv_heads, 128, 64, torch.bfloat16)
    cache.page_table[2:] = cache.page_table[2, 0]
    new = New(cache, 16, has_norms=True)
    others = torch.ones(len(cache.keys), dtype=torch.bool, device="cuda").index_fill_(0, new.slots, False)
    before = cache.keys[others], cache.values[others]
    got = decode_new(decoders(kind, 16, kv_heads, 64), cache, new)[:2].float()
    assert torch.equal(cache.keys[others], before[0])
    assert torch.equal(cache.values[others], before[1])
    assert cache.keys[new.slots].isfinite().all()
    assert cache.values[new.slots].isfinite().all()
    want = new.in_float32(cache)[:2]
    assert ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 8e-3


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 16), (32, 4), (12, 2)])
def test_rows_without_keys_may_be_anywhere_among_many(decoders, heads, kv_heads, rotates):
    """Several requests and several rows without keys in a share, by a graph that is replayed on other lengths."""
    generator = torch.Generator().manual_seed(1)
    longest = torch.randint(1, 300, (320,), generator=generator)
    cache = Cache(longest.tolist(), kv_heads, 128, 64, torch.bfloat16)
    new = New(cache, heads, has_norms=True) if rotates else None
    q = torch.randn(len(longest), heads, 128, device="cuda").bfloat16()
    decoder = decoders(SHARES, heads, kv_heads, 64)

    def run() -> torch.Tensor:
        return decode(decoder, cache, q) if new is None else decode_new(decoder, cache, new)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    want = in_float32(cache, q) if new is None else new.in_float32(cache)
    for share_of_none in (0.0, 0.3, 0.9):
        has_keys = torch.rand(len(longest), generator=generator) >= share_of_none
        has_keys[:3] = share_of_none == 0  # the first and the last ones too
        has_keys[-20:] = share_of_none == 0
        cache.lengths.copy_(longest * has_keys)
        if new is not None:
            new.forget(cache)
        graph.replay()
        rows = has_keys.cuda()
        error = (out[rows].float() - want[rows]).norm(dim=(1, 2)) / want[rows].norm(dim=(1, 2))
        assert error.max() < 8e-3
        if new is not None:
            assert torch.equal(cache.keys[new.slots].isfinite().all(dim=(1, 2)), rows)
        assert (decoder._parts == MISSING).all()


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(("kind", "kv_heads"), [(CLUSTERS, 8), (SHARES, 8), (SHARES, 4)])
def test_rows_without_keys_are_passed_over(decoders, kind, kv_heads, rotates):
    lengths = [577, 0, 64, 1, 0, 0]
    cache = Cache([max(1, length) for length in lengths], kv_heads, 128, 64, torch.bfloat16)
    new = New(cache, 16, has_norms=True) if rotates else None
    cache.lengths.copy_(torch.tensor(lengths))
    q = torch.randn(len(lengths), 16, 128, device="cuda").bfloat16()
    is_row = cache.lengths > 0
    before = cache.keys.clone(), cache.values.clone()
    decoder = decoders(kind, 16, kv_heads, 64)
    got = (decode_new(decoder, cache, new) if new else decode(decoder, cache, q))[is_row].float()
    if new:
        others = torch.ones(len(cache.keys), dtype=torch.bool, device="cuda").index_fill_(0, new.slots[is_row], False)
        assert torch.equal(cache.keys[others], before[0][others])
        assert torch.equal(cache.values[others], before[1][others])
    want = (new.in_float32(cache) if new else in_float32(cache, q))[is_row]
    assert ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 8e-3


@pytest.mark.parametrize(("kind", "kv_heads"), [(CLUSTERS, 8), (SHARES, 8), (SHARES, 4)])
def test_a_batch_of_rows_without_keys_is_nothing_to_do(decoders, kind, kv_heads):
    decoder = decoders(kind, 2 * kv_heads, kv_heads, 64)
    cache = Cache([1] * 40, kv_heads, 128, 64, torch.bfloat16)
    q = torch.randn(40, 2 * kv_heads, 128, device="cuda").bfloat16()
    cache.lengths.zero_()
    out = torch.full_like(q, 7.0)
    decode(decoder, cache, q, out)
    assert (out == 7.0).all()
    cache.lengths.fill_(1)
    only_value = cache.values[cache.page_table[:, 0].long() * 64]
    assert torch.equal(decode(decoder, cache, q), only_value.repeat_interleave(2, 1))


@pytest.mark.parametrize("word", [-1, 0x7FFF, 0x7F80], ids=["all bits", "NaN", "infinity"])
@pytest.mark.parametrize(("kind", "kv_heads"), [(CLUSTERS, 8), (SHARES, 8), (SHARES, 4)])
def test_values_that_are_no_numbers_stay_their_requests_own(decoders, kind, kv_heads, word):
    """Also in requests of several blocks, which see by what others leave that it is there."""
    cache = Cache([3000, 577, 3000], kv_heads, 128, 64, torch.bfloat16)
    slots = cache.page_table[::2].long()[:, :, None] * 64 + torch.arange(64, device="cuda")
    cache.values.view(torch.int16)[slots.flatten()] = word
    q = torch.randn(3, 16, 128, device="cuda").bfloat16()
    for _ in range(3):
        got = decode(decoders(kind, 16, kv_heads, 64), cache, q)
        assert not got[::2].isfinite().any()
        assert got[1].isfinite().all()


@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_every_launch_leaves_shares_as_it_found_them(decoders, kv_heads):
    """Blocks see the sums of others by their values in memory."""
    decoder = decoders(SHARES, 4 * kv_heads, kv_heads, 64)
    for lengths in ([3000], [577] * 40, [1] * 200, [16, 2000, 16]):
        cache = Cache(lengths, kv_heads, 128, 64, torch.bfloat16)
        q = torch.randn(len(lengths), 4 * kv_heads, 128, device="cuda").bfloat16()
        first = decode(decoder, cache, q)
        assert (decoder._parts == MISSING).all()
        for _ in range(20):
            assert torch.equal(decode(decoder, cache, q), first)


def test_among_any_others_clusters_give_a_request_the_same_numbers_bitwise(decoders):
    lengths = [577, 64, 4096, 1, 300]
    q = torch.randn(len(lengths), 32, 128, device="cuda").bfloat16()
    cache = Cache(lengths, 8, 128, 64, torch.bfloat16)
    together = decode(decoders(CLUSTERS, 32, 8, 64), cache, q)
    order = [3, 2, 0, 4, 1]
    cache.page_table, cache.lengths = cache.page_table[order], cache.lengths[order]
    assert torch.equal(decode(decoders(CLUSTERS, 32, 8, 64), cache, q[order]), together[order])


@pytest.mark.parametrize("kind", [CLUSTERS, SHARES])
def test_a_graph_replays_it_on_other_requests(decoders, kind):
    cache = Cache([577, 64], 8, 128, 64, torch.bfloat16)
    q = torch.randn(2, 16, 128, device="cuda").bfloat16()
    decoder = decoders(kind, 16, 8, 64)
    decode(decoder, cache, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(decoder, cache, q)
    cache.lengths.copy_(torch.tensor([130, 5]))
    graph.replay()
    assert torch.equal(out, decode(decoder, cache, q))


@pytest.mark.parametrize(("kind", "kv_heads"), [(CLUSTERS, 8), (SHARES, 8), (SHARES, 4)])
def test_a_long_request(decoders, kind, kv_heads):
    cache = Cache([70_000, 3], kv_heads, 128, 64, torch.bfloat16)
    assert worst_error(decoders(kind, 32, kv_heads, 64), cache, 32) < 1e-2


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "lengths"),
    [
        (32, 8, [70_000]),
        (32, 8, [6144]),
        (28, 4, [20_001]),
        (16, 8, [1536, 9000, 700]),
        (64, 8, [20_000, 1, 3000, 767, 1536, 0, 1535, 640]),
    ],
    ids=str,
)
def test_clusters_of_one_long_request_add_up_what_they_leave(decoders, heads, kv_heads, lengths, rotates):
    """Each time the same, of requests with fewer clusters and with more; the last one's new key is any cluster's."""
    cache = Cache([max(1, length) for length in lengths], kv_heads, 128, 64, torch.bfloat16)
    poison(cache)
    new = New(cache, heads, has_norms=True) if rotates else None
    cache.lengths.copy_(torch.tensor(lengths))
    q = 2 * torch.randn(len(lengths), heads, 128, device="cuda").bfloat16()
    decoder = decoders(CLUSTERS, heads, kv_heads, 64)
    is_row = cache.lengths > 0
    outputs = []
    for _ in range(5):
        if new is not None:
            new.forget(cache)
        outputs.append((decode(decoder, cache, q) if new is None else decode_new(decoder, cache, new))[is_row])
        assert (decoder._left == MISSING).all()
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    want = (in_float32(cache, q) if new is None else new.in_float32(cache))[is_row]
    assert ((outputs[0].float() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 1e-2


def decode_behind_a_late_write(decoder: Decode, cache: Cache, q: torch.Tensor) -> torch.Tensor:
    """In a graph: the newest keys are infinite until a kernel writes them that has let the next one begin before."""
    last = cache.lengths.long() - 1
    page = cache.page_table.gather(1, (last // cache.page_size)[:, None]).squeeze(1).long()
    slots = page * cache.page_size + last % cache.page_size
    new_keys, new_values = cache.keys[slots], cache.values[slots]
    late = late_kernel(*LATE_ROWS)
    arguments = [address_of(tensor) for tensor in (cache.keys, cache.values, new_keys, new_values, slots)]
    arguments.append(ctypes.c_int(len(slots)))
    decode(decoder, cache, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.keys.index_fill_(0, slots, torch.inf)
        cache.values.index_fill_(0, slots, torch.inf)
        out = torch.full_like(q, torch.nan)  # no kernel between the next two: it would wait
        late.launch(LATE_BLOCKS, new_keys[0].numel() // 8, arguments)
        decoder([q, cache.keys, cache.values, cache.page_table, cache.lengths, out])
    for _ in range(3):
        graph.replay()
    return out


def decode_behind_a_late_projection(decoder: Decode, cache: Cache, new: New) -> torch.Tensor:
    """In a graph: what is to be rotated, by what, and values, are infinite until a kernel writes them that has let the
    next one begin before."""
    count, num_threads = len(cache.lengths), 32
    late = late_kernel(*LATE_ROWS)
    written, none = new.memory.clone(), torch.empty_like(new.memory)
    rows = torch.arange(len(written) // (8 * num_threads), device="cuda")
    arguments = [address_of(tensor) for tensor in (new.memory, none, written, written, rows)]
    arguments.append(ctypes.c_int(len(rows)))
    decode_new(decoder, cache, new)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new.forget(cache)
        new.memory.fill_(torch.inf)
        out = torch.full((count, *new.rope_inputs.q.shape[2:]), torch.nan, dtype=torch.bfloat16, device="cuda")
        late.launch(LATE_BLOCKS, num_threads, arguments)
        decoder([new.rope_inputs.q[0], cache.keys, cache.values, cache.page_table, cache.lengths, out], new.rope_inputs)
    for _ in range(3):
        graph.replay()
    return out


BEHIND_LATE_KERNELS = pytest.mark.parametrize(
    ("kind", "num_requests", "kv_heads"),
    [(CLUSTERS, 1, 8), (CLUSTERS, 8, 8), (SHARES, 3, 8), (SHARES, 100, 8), (SHARES, 3, 4), (SHARES, 100, 4)],
)


@BEHIND_LATE_KERNELS
def test_what_the_kernel_ahead_projects_is_rotated_when_that_has_ended(decoders, kind, num_requests, kv_heads):
    cache = Cache((LENGTHS * 13)[-num_requests:], kv_heads, 128, 64, torch.bfloat16)
    new = New(cache, 16, has_norms=True)
    got = decode_behind_a_late_projection(decoders(kind, 16, kv_heads, 64), cache, new).float()
    want = new.in_float32(cache)
    assert new.errors_of_cache(cache)[0] < 5e-3
    assert ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 8e-3


@BEHIND_LATE_KERNELS
def test_what_the_kernel_ahead_writes_is_read_when_that_has_ended(decoders, kind, num_requests, kv_heads):
    cache = Cache((LENGTHS * 13)[-num_requests:], kv_heads, 128, 64, torch.bfloat16)
    q = 2 * torch.randn(num_requests, 16, 128, device="cuda").bfloat16()
    want = in_float32(cache, q)
    got = decode_behind_a_late_write(decoders(kind, 16, kv_heads, 64), cache, q).float()
    assert ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 8e-3


@pytest.mark.parametrize(
    ("wait", "late"),
    [
        ("int begin) {\n  wait_for_prerequisites();", "projection"),
        ("has_new_key, i) && !has_waited) {\n        wait_for_prerequisites();", "write"),
    ],
    ids=["who makes requests ready", "who reads tiles"],
)
def test_each_warp_of_shares_that_does_not_wait_is_found_out(tmp_path_factory, monkeypatch, wait, late):
    def source(kernel: CudaKernel) -> str:
        whole = kernel_source(kernel)
        assert whole.count(wait) == 1
        return whole.replace(wait, wait.removesuffix("wait_for_prerequisites();"))

    monkeypatch.setattr("mllm_compile.kernels.cuda.kernel_source", source)
    cache = Cache(LENGTHS, 8, 128, 64, torch.bfloat16)
    decoder = compiled_decoder(tmp_path_factory.mktemp("hasty"), SHARES, 16, 8, 64)
    if late == "projection":
        got = decode_behind_a_late_projection(decoder, cache, New(cache, 16, has_norms=True))
    else:
        got = decode_behind_a_late_write(decoder, cache, torch.randn(len(LENGTHS), 16, 128, device="cuda").bfloat16())
    assert not got.isfinite().all()


@pytest.mark.parametrize("kind", [CLUSTERS, SHARES])
def test_a_kernel_that_does_not_wait_is_found_out(tmp_path_factory, monkeypatch, kind):
    """By the tests before this one."""

    def source(kernel: CudaKernel) -> str:
        return kernel_source(kernel).replace("griddepcontrol.wait;", "")

    monkeypatch.setattr("mllm_compile.kernels.cuda.kernel_source", source)
    cache = Cache(LENGTHS, 8, 128, 64, torch.bfloat16)
    q = torch.randn(len(LENGTHS), 16, 128, device="cuda").bfloat16()
    decoder = compiled_decoder(tmp_path_factory.mktemp("hasty"), kind, 16, 8, 64)
    assert not decode_behind_a_late_write(decoder, cache, q).isfinite().all()
    new = New(cache, 16, has_norms=True)
    assert not decode_behind_a_late_projection(decoder, cache, new).isfinite().all()
