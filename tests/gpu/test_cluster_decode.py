"""The decode kernel of clusters, compiled as for a runtime, against float32."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from mllm_compile.cuda_kernels import KernelCompiler, can_compile_kernels
from mllm_compile.progress import NullReporter
from mllm_compile.runtime.cluster_decode.decoder import ClusterDecode
from mllm_compile.runtime.cluster_decode.shapes import cluster_kernels
from tests.gpu.test_split_decode import LENGTHS, Cache, in_float32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not can_compile_kernels("cuda:0"), reason="needs a Hopper GPU and NVRTC"
    ),
]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    """By (query heads, KV heads, page size)."""

    @cache
    def of(heads: int, kv_heads: int, page_size: int) -> ClusterDecode:
        folder, kernels = tmp_path_factory.mktemp("decode"), cluster_kernels(heads, kv_heads, page_size)
        with KernelCompiler() as compiler:
            compiler.write(kernels, folder, NullReporter())
        binaries = {path.stem: path.read_bytes() for path in folder.iterdir()}
        return ClusterDecode(kernels, binaries, 128**-0.5, torch.device("cuda:0"))

    return of


def decode(decoder: ClusterDecode, cache: Cache, q: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    decoder([q, cache.keys, cache.values, cache.page_table, cache.lengths, out])
    return out


def poison(cache: Cache) -> None:
    """Makes all that stands behind the requests' last keys infinite."""
    is_key = torch.zeros(cache.keys.shape[0], dtype=torch.bool, device="cuda")
    for row, length in enumerate(cache.lengths.tolist()):
        positions = torch.arange(length, device="cuda")
        slots = cache.page_table[row].long()[positions // cache.page_size] * cache.page_size
        is_key[slots + positions % cache.page_size] = True
    cache.keys[~is_key] = torch.inf
    cache.values[~is_key] = torch.inf


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_size"), [(16, 8, 64), (32, 8, 16), (8, 8, 128), (64, 8, 32), (50, 10, 64)]
)
def test_numbers_are_those_of_float32(decoders, heads, kv_heads, page_size, num_requests):
    for lengths in (LENGTHS[:num_requests], LENGTHS[::-1][:num_requests], [640] * num_requests):
        cache = Cache(lengths, kv_heads, 128, page_size, torch.bfloat16)
        poison(cache)
        q = 2 * torch.randn(num_requests, heads, 128, device="cuda").bfloat16()
        got, want = decode(decoders(heads, kv_heads, page_size), cache, q).float(), in_float32(cache, q)
        assert ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max() < 8e-3


def test_a_request_has_the_same_numbers_bitwise_among_any_others(decoders):
    lengths = [577, 64, 4096, 1, 300]
    q = torch.randn(len(lengths), 32, 128, device="cuda").bfloat16()
    cache = Cache(lengths, 8, 128, 64, torch.bfloat16)
    together = decode(decoders(32, 8, 64), cache, q)
    order = [3, 2, 0, 4, 1]
    cache.page_table, cache.lengths = cache.page_table[order], cache.lengths[order]
    assert torch.equal(decode(decoders(32, 8, 64), cache, q[order]), together[order])


def test_a_graph_replays_it_on_other_requests(decoders):
    cache = Cache([577, 64], 8, 128, 64, torch.bfloat16)
    q = torch.randn(2, 16, 128, device="cuda").bfloat16()
    decoder = decoders(16, 8, 64)
    decode(decoder, cache, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(decoder, cache, q)
    cache.lengths.copy_(torch.tensor([130, 5]))
    graph.replay()
    assert torch.equal(out, decode(decoder, cache, q))


def test_a_long_request(decoders):
    cache = Cache([70_000], 8, 128, 64, torch.bfloat16)
    q = torch.randn(1, 32, 128, device="cuda").bfloat16()
    got, want = decode(decoders(32, 8, 64), cache, q).float(), in_float32(cache, q)
    assert (got - want).norm() < 1e-2 * want.norm()
