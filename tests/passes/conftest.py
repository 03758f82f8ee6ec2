"""A stand-in for the op that norms, rotates and writes the cache, whose kernel needs CUDA and Triton."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mllm_compile.passes.fuse_rope_cache import FuseRopeCache
from mllm_compile.passes.match import nodes
from mllm_compile.passes.rotate_in_attention import RotateInAttention
from tests.passes.support.stand_ins import only_kernel_passes


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if weight is None else x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]


def rope_and_cache(q, k, v, cos, sin, q_weight, k_weight, eps, slots, keys, values):
    q, k = (_rotate(_norm(x, weight, eps), cos, sin)[0] for x, weight in ((q, q_weight), (k, k_weight)))
    if not len(slots):  # it is left to attention
        return torch.full_like(q, torch.nan), torch.full_like(k, torch.nan)
    keys[slots] = k
    values[slots] = v
    return q.contiguous(), k.contiguous()


@pytest.fixture(scope="module")
def stand_in() -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("the real op is defined where there is a GPU")
    library = torch.library.Library("mllm", "FRAGMENT")
    library.define(
        "rope_and_cache(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, "
        "float eps, Tensor slots, Tensor(a!) keys, Tensor(b!) values) -> (Tensor, Tensor)"
    )
    library.impl("rope_and_cache", rope_and_cache, "CPU")
    yield
    del library


@pytest.fixture
def rope_on_cpu(stand_in, monkeypatch):
    """Of the passes that put kernels into pieces only those that are about rotation run, for a CPU, in float32, on
    pieces that run as traced."""
    monkeypatch.setattr(nodes, "KERNEL_DTYPES", (torch.float32,))
    only_kernel_passes(monkeypatch, FuseRopeCache, RotateInAttention)
