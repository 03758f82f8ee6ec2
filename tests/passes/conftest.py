"""A stand-in for the op that norms, rotates and writes the cache, whose kernel needs CUDA and Triton."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mllm_compile.passes.fuse_rope_cache import FuseRopeCache
from mllm_compile.passes.match import nodes
from mllm_compile.passes.rotate_in_attention import RotateInAttention
from tests.passes.support.stand_ins import ROPE_AND_CACHE, only_kernel_passes, stand_in_ops


@pytest.fixture(scope="module")
def stand_in() -> Iterator[None]:
    with stand_in_ops(ROPE_AND_CACHE):
        yield


@pytest.fixture
def rope_on_cpu(stand_in, monkeypatch):
    """Of the passes that put kernels into pieces only those that are about rotation run, for a CPU, in float32, on
    pieces that run as traced."""
    monkeypatch.setattr(nodes, "KERNEL_DTYPES", (torch.float32,))
    only_kernel_passes(monkeypatch, FuseRopeCache, RotateInAttention)
