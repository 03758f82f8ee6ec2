"""Names the decodes that the kernels take, for how many requests each is the faster, and what a program stores of
them; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mllm_compile.runtime.attention.hopper.clusters import (
    LONG_TOKENS,
    MOST_SEQUENCES,
    MOST_SEQUENCES_OF_FEW_HEADS,
    MOST_SEQUENCES_OF_LONG,
    ClusterKernel,
)
from mllm_compile.runtime.attention.hopper.clusters import TILE as CLUSTER_TILE
from mllm_compile.runtime.attention.hopper.kernel import HEAD_DIM, DecodeKernel
from mllm_compile.runtime.attention.hopper.shares import HEAD_DIMS, TILE, ShareKernel
from mllm_compile.runtime.files.json_data import from_json

_MAX_GROUP = 8  # query heads of a KV head; half the rows of a product
_MIN_PAGE = TILE  # a tile of shares is of one page
_KERNELS: dict[str, type[DecodeKernel]] = {kernel.source: kernel for kernel in (ClusterKernel, ShareKernel)}


def are_served(num_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> bool:
    """True if kernels exist for such heads and pages."""
    fits_pages = page_size % CLUSTER_TILE == 0 or (CLUSTER_TILE % page_size == 0 and page_size >= _MIN_PAGE)
    return fits_pages and fuses_rope_of_heads(num_heads, num_kv_heads, head_dim)


def fuses_rope_of_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """True if kernels exist for such heads, in pages of some size; all of them rotate."""
    return head_dim in HEAD_DIMS and num_heads // num_kv_heads <= _MAX_GROUP


def has_clusters(head_dim: int) -> bool:
    """True if such heads have kernels for few requests."""
    return head_dim == HEAD_DIM


def most_in_clusters(shares: ShareKernel, max_tokens: int) -> int:
    """The most requests x KV heads that clusters serve faster, where a request has up to `max_tokens` tokens; `shares`
    serves the same heads."""
    if max_tokens > LONG_TOKENS:
        return MOST_SEQUENCES_OF_LONG
    return MOST_SEQUENCES if shares.is_alone else MOST_SEQUENCES_OF_FEW_HEADS


def kernel_from_json(data: Mapping[str, Any]) -> DecodeKernel:
    """Reads what `to_json` wrote. Raises KeyError or ValueError for anything else."""
    return from_json(_KERNELS[data["source"]], {name: value for name, value in data.items() if name != "source"})
