"""The library of paged attention, compiled once a process, for tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mllm_compile.kernels.cpu import compiled
from mllm_compile.runtime.attention.paged.attend import PagedAttention
from mllm_compile.runtime.attention.paged.library import PAGED_ATTENTION
from mllm_compile.runtime.cpu.load import load_library


def paged_binary() -> bytes:
    with TemporaryDirectory() as folder:
        return compiled(PAGED_ATTENTION, Path(folder) / "cpu")


@cache
def paged_attention() -> PagedAttention:
    return PagedAttention(load_library(PAGED_ATTENTION, {PAGED_ATTENTION.name: paged_binary()}))
