"""The cluster kernels of several tokens a request, compiled as for a runtime, against float32."""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from mllm_compile.check.decode_attention import _rotated
from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.hopper.clusters import cluster_kernels, most_rows
from mllm_compile.runtime.attention.hopper.decoder import ClusterDecode
from mllm_compile.runtime.attention.hopper.kernel import MISSING
from mllm_compile.runtime.cuda.driver import address_of
from tests.gpu.late_kernels import LATE_BLOCKS, late_kernel
from tests.gpu.test_hopper_decode import LATE_ROWS, poison
from tests.gpu.test_split_decode import Cache, worst_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]

# Tokens of a request, query heads, KV heads, page size: of each number of units of 16 queries, full and not.
SHAPES = [
    (2, 16, 8, 64),
    (2, 32, 8, 16),
    (3, 40, 8, 64),
    (4, 32, 8, 16),
    (4, 12, 12, 64),
    (4, 64, 8, 32),
    (5, 28, 4, 16),
    (8, 32, 8, 64),
    (8, 64, 8, 128),
    (9, 14, 2, 16),
    (16, 32, 8, 16),
    (16, 8, 8, 64),
]
# Tokens in the cache ahead of a step: ends of pages, of tiles, of a warp's keys, and of what the ring holds.
BEFORE = [0, 1, 13, 15, 16, 47, 48, 49, 60, 61, 62, 63, 64, 65, 120, 126, 127, 128, 300, 508, 511, 512, 577, 1535, 4095]


class Step:
    """New tokens of requests, as a verify step has them. Their keys and values are not in the cache yet: there, and
    behind them, are infinities. Rows without a token are infinite too.

    Attributes:
        cache: of the requests, a row each.
        rows: the same cache with a row for each token, and lengths of 0 without one.
        is_token: [T] bool.
        slots: of the tokens alone.
    """

    def __init__(
        self,
        before: Sequence[int],
        counts: Sequence[int],
        shape: tuple[int, int, int, int],
        has_norms: bool = True,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Args: dtype: of the cache. In one of e4m3 NaN is where infinity is in others."""
        torch.manual_seed(0)
        tokens, heads, kv_heads, page_size = shape
        dim, num_rows = 128, len(before) * tokens
        lengths = [max(1, sum(both)) for both in zip(before, counts, strict=True)]
        self.cache = Cache(lengths, kv_heads, dim, page_size, torch.bfloat16)
        first, count = (torch.tensor(values, device="cuda")[:, None] for values in (before, counts))
        place = torch.arange(tokens, device="cuda")[None]
        self.is_token = (place < count).flatten()
        positions = ((first + place) * (place < count)).flatten()
        self.rows = copy.copy(self.cache)
        # The pages of rows without a token are any.
        pages = self.cache.page_table.repeat_interleave(tokens, 0)
        self.rows.page_table = torch.where(self.is_token[:, None], pages, 0)
        self.rows.lengths = ((positions + 1) * self.is_token).int()
        page = pages.gather(1, (positions // page_size)[:, None]).squeeze(1).long()
        self.slots = (page * page_size + positions % page_size)[self.is_token]
        self.cache.lengths = (first + count).flatten().int() * (count.flatten() > 0)
        poison(self.cache)
        # fp8 as bytes, which can be put anywhere; infinity becomes NaN.
        self.cache.keys, self.cache.values = (x.to(dtype) for x in (self.cache.keys, self.cache.values))
        self._bits = torch.uint8 if dtype.itemsize == 1 else torch.int16

        width = (heads + 2 * kv_heads) * dim
        self.memory = torch.randn(num_rows, width + 2 * dim, device="cuda").bfloat16().flatten()
        packed = self.memory[: num_rows * width].view(1, num_rows, width)
        packed[:, ~self.is_token] = torch.inf
        q, k, v = (
            part.unflatten(-1, (-1, dim)) for part in packed.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        )
        angles = self.memory[num_rows * width :].view(2, 1, num_rows, dim)
        turns = 6 * torch.rand(1, num_rows, dim, device="cuda")
        angles.copy_(torch.stack((turns.cos(), turns.sin())))
        norms = [(1 + torch.rand(dim, device="cuda")).bfloat16() for _ in range(2)] if has_norms else []
        self.rope_inputs = RopeInputs.of([q, k, *angles.unbind(), *norms], v[0], 1e-6)
        self.q, self.k = (x.bfloat16() for x in _rotated(self.rope_inputs))
        self.forget()

    def forget(self) -> None:
        for pages in (self.cache.keys, self.cache.values):
            pages.view(self._bits)[self.slots] = self._as_cached(torch.tensor(torch.inf, device="cuda"))

    def write(self) -> None:
        """Brings the new keys and values into the cache, as a kernel ahead does."""
        self.cache.keys.view(self._bits)[self.slots] = self._as_cached(self.k[self.is_token])
        self.cache.values.view(self._bits)[self.slots] = self._as_cached(self.rope_inputs.v[self.is_token])

    def _as_cached(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.cache.keys.dtype).view(self._bits)

    def run(self, decoder: ClusterDecode, rotates: bool, *sinks: torch.Tensor) -> torch.Tensor:
        """The outputs [T, H, D]; 7 in rows that the kernel leaves alone."""
        out = torch.full_like(self.q, 7.0)
        q = self.rope_inputs.q[0] if rotates else self.q
        inputs = [q, self.cache.keys, self.cache.values, self.rows.page_table, self.rows.lengths, out, *sinks]
        decoder(inputs, self.rope_inputs if rotates else None)
        return out

    def in_float32(self, q: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
        """Of queries [T, H, D]; rows without a token are NaN."""
        results = []
        of_requests = (x.unflatten(0, (len(self.cache.lengths), -1)) for x in (q.float(), self.rows.lengths))
        for row, (queries, lengths) in enumerate(zip(*of_requests, strict=True)):
            keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in self.cache.of_request(row))
            logits = torch.einsum("chd,lhd->chl", queries, keys) * q.shape[2] ** -0.5
            places = torch.arange(len(keys), device="cuda")
            logits.masked_fill_(places >= lengths[:, None, None], -math.inf)
            for one in sinks:
                logits = torch.cat((logits, one.float()[:, None].expand(len(queries), -1, 1)), -1)
            results.append(torch.einsum("chl,lhd->chd", logits.softmax(-1)[..., : len(keys)], values))
        return torch.cat(results)

    def check(self, decoder: ClusterDecode, rotates: bool, *sinks: torch.Tensor) -> torch.Tensor:
        """Runs it, compares with float32, and gives the outputs."""
        others = torch.ones(len(self.cache.keys), dtype=torch.bool, device="cuda").index_fill_(0, self.slots, False)
        keys, values = (pages.view(self._bits) for pages in (self.cache.keys, self.cache.values))
        before = keys[others], values[others]
        self.forget() if rotates else self.write()
        out = self.run(decoder, rotates, *sinks)
        is_token = self.is_token
        if rotates:
            want = _rotated(self.rope_inputs)[1][is_token]
            got = keys[self.slots].view(self.cache.keys.dtype).float()
            error = (got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))
            assert error.max() < (4e-2 if keys.itemsize == 1 else 5e-3)
        assert torch.equal(values[self.slots], self._as_cached(self.rope_inputs.v[is_token]))
        assert torch.equal(keys[others], before[0])
        assert torch.equal(values[others], before[1])
        assert (out[~is_token] == 7.0).all()
        q = _rotated(self.rope_inputs)[0] if rotates else self.q
        want = self.in_float32(q, *sinks)[is_token]
        got = out[is_token].float()
        assert ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 8e-3
        return out


def compiled(folder: Path, shape: tuple[int, int, int, int], sinks: bool, fp8: bool) -> ClusterDecode:
    tokens, heads, kv_heads, page_size = shape
    kernels = cluster_kernels(heads, kv_heads, page_size, sinks=sinks, fp8=fp8, tokens=tokens)
    with KernelCompiler() as compiler:
        compiler.write(kernels, folder, NullReporter())
    return ClusterDecode(
        kernels, {path.stem: path.read_bytes() for path in folder.iterdir()}, 128**-0.5, torch.device("cuda:0")
    )


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    """By tokens of a request, query heads, KV heads and page size."""

    @cache
    def of(*shape: int, sinks: bool = False, fp8: bool = False) -> ClusterDecode:
        return compiled(tmp_path_factory.mktemp("verify"), shape, sinks, fp8)

    return of


def counts_of(before: Sequence[int], tokens: int) -> list[int]:
    """Any numbers of tokens, whole drafts among them and requests without one."""
    return [(tokens, 1, tokens, 0, 1 + tokens // 2, tokens - 1)[i % 6] for i in range(len(before))]


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_token_sees_the_keys_up_to_its_own(decoders, shape, rotates):
    tokens, _, kv_heads, _ = shape
    decoder = decoders(*shape)
    for before in ([511], [62], [0], BEFORE, BEFORE[::-1], [508, 61] * (128 // kv_heads)):
        counts = [tokens] * len(before) if len(before) == 1 else counts_of(before, tokens)
        Step(before, counts, shape, has_norms=kv_heads != 4).check(decoder, rotates)


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("shape", [one for one in SHAPES if one[0] * one[1] // one[2] <= most_rows(fp8=True)], ids=str)
def test_each_token_sees_the_keys_of_e4m3_up_to_its_own(decoders, shape, rotates):
    tokens, _, kv_heads, _ = shape
    decoder = decoders(*shape, fp8=True)
    for before in ([511], [62], [0], BEFORE, BEFORE[::-1], [508, 61] * (128 // kv_heads), [20_000, 1, 767]):
        counts = [tokens] * len(before) if len(before) == 1 else counts_of(before, tokens)
        step = Step(before, counts, shape, has_norms=kv_heads != 4, dtype=torch.float8_e4m3fn)
        first = step.check(decoder, rotates)
        if rotates:
            step.forget()
        assert torch.equal(step.run(decoder, rotates), first)
        assert (decoder._left == MISSING).all()


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("before", [3, 61, 511, 14_000])
def test_a_drafted_tokens_values_of_e4m3_that_are_none_do_not_reach_the_tokens_before_it(decoders, before, rotates):
    shape = 4, 32, 8, 16
    decoder = decoders(*shape, fp8=True)
    step = Step([before, before], [4, 4], shape, dtype=torch.float8_e4m3fn)
    want = step.check(decoder, rotates)
    step.rope_inputs.v[2, :, 5] = torch.nan
    if not rotates:
        step.write()
    got = step.run(decoder, rotates)
    assert torch.equal(got[:2], want[:2])
    assert not got[2:4].isfinite().all(-1).any()
    assert torch.equal(got[4:], want[4:])


@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 32, 64])
@pytest.mark.parametrize("tokens", [2, 4, 8, 16])
def test_batches_of_each_division_are_the_same_each_time(decoders, tokens, num_requests):
    shape = tokens, 32, 8, 16
    decoder = decoders(*shape)
    before = (BEFORE * 3)[-num_requests:]
    step = Step(before, counts_of(before, tokens), shape)
    first = step.check(decoder, rotates=True)
    keys = step.cache.keys.clone()
    for _ in range(10):
        step.forget()
        assert torch.equal(step.run(decoder, True), first)
        assert torch.equal(step.cache.keys, keys)
        assert (decoder._left == MISSING).all()


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize(
    ("tokens", "before"),
    [
        (4, [70_000]),
        (8, [6144]),
        (16, [20_000]),
        (4, [1536, 9000, 700]),
        (8, [20_000, 1, 3000, 767, 1536, 0, 1535, 640]),
    ],
    ids=str,
)
def test_clusters_of_one_long_request_add_up_what_they_leave(decoders, tokens, before, rotates):
    shape = tokens, 32, 8, 64
    decoder = decoders(*shape)
    step = Step(before, [tokens] * len(before), shape)
    first = step.check(decoder, rotates)
    for _ in range(5):
        if rotates:
            step.forget()
        assert torch.equal(step.run(decoder, rotates), first)
        assert (decoder._left == MISSING).all()


@pytest.mark.parametrize("rotates", [True, False])
def test_sinks_take_weight_from_all_keys_of_a_token(decoders, rotates):
    shape = 4, 64, 8, 32
    sinks = torch.linspace(-4, 10, 64, device="cuda").bfloat16()
    step = Step(BEFORE, counts_of(BEFORE, 4), shape)
    got = step.check(decoders(*shape, sinks=True), rotates, sinks)[step.is_token]
    assert worst_head(got, step.in_float32(step.q)[step.is_token]) > 0.5, "they are felt"


@pytest.mark.parametrize("word", [0x7FFF, 0x7F80], ids=["NaN", "infinity"])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("before", [3, 61, 511, 14_000])
def test_a_drafted_tokens_numbers_that_are_none_do_not_reach_the_tokens_before_it(decoders, before, rotates, word):
    shape = 4, 32, 8, 16
    decoder = decoders(*shape)
    step = Step([before, before], [4, 4], shape)
    want = step.check(decoder, rotates)
    step.rope_inputs.v[2, :, 5] = torch.tensor(word, dtype=torch.int16).view(torch.bfloat16).cuda()
    if not rotates:
        step.write()
    got = step.run(decoder, rotates)
    assert torch.equal(got[:2], want[:2])
    assert not got[2:4].isfinite().all(-1).any()
    assert torch.equal(got[4:], want[4:])
    assert torch.equal(step.cache.values[step.slots].view(torch.int16), step.rope_inputs.v.view(torch.int16))


def test_a_graph_replays_it_on_other_lengths(decoders):
    shape = 4, 32, 8, 16
    decoder = decoders(*shape)
    step = Step([577, 61, 12], [4, 4, 4], shape)
    other = Step([130, 60, 8], [2, 0, 4], shape)
    step.run(decoder, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run(decoder, True)
    step.rows.lengths.copy_(other.rows.lengths)
    graph.replay()
    assert torch.equal(out, step.run(decoder, True))
    assert (out[~other.is_token] == 7.0).all()


@pytest.mark.parametrize("num_requests", [1, 8, 32])
@pytest.mark.parametrize("rotates", [True, False])
def test_what_the_kernel_ahead_makes_is_read_when_that_has_ended(decoders, num_requests, rotates):
    """Projections, or new keys and values, are infinite until it writes them. It lets the next kernel begin before."""
    shape = 4, 32, 8, 64
    decoder = decoders(*shape)
    before = (BEFORE * 2)[-num_requests:]
    step = Step(before, [4] * num_requests, shape)
    want = step.check(decoder, rotates)
    late = late_kernel(*LATE_ROWS)
    if rotates:
        written = step.memory.clone()
        tensors = [step.memory, torch.empty_like(written), written, written]
        rows, num_threads = torch.arange(len(written) // 256, device="cuda"), 32
    else:
        tensors = [step.cache.keys, step.cache.values, step.k[step.is_token], step.rope_inputs.v[step.is_token]]
        rows, num_threads = step.slots, 128
    arguments = [*map(address_of, (*tensors, rows)), ctypes.c_int(len(rows))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.forget()
        if rotates:
            step.memory.fill_(torch.inf)
        out = torch.full_like(step.q, torch.nan)  # no kernel between the next two: it would wait
        late.launch(LATE_BLOCKS, num_threads, arguments)
        q = step.rope_inputs.q[0] if rotates else step.q
        inputs = [q, step.cache.keys, step.cache.values, step.rows.page_table, step.rows.lengths, out]
        decoder(inputs, step.rope_inputs if rotates else None)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, want)
