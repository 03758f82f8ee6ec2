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
    SIDE_BY_SIDE,
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
    return fits_pages and writes_keys_of_heads(num_heads, num_kv_heads, head_dim)


def heads_together(num_kv_heads: int, head_dim: int) -> int:
    """KV heads that kernels take as one: two of 64 as one of 128, whose halves they are; else 1."""
    return 2 if head_dim * 2 == HEAD_DIM and num_kv_heads % 2 == 0 else 1


def fuses_rope_of_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """True if kernels exist for such heads, in pages of some size; all of them rotate."""
    return head_dim in HEAD_DIMS and num_heads // num_kv_heads <= _MAX_GROUP


def writes_keys_of_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Likewise of heads that do not rotate."""
    together = heads_together(num_kv_heads, head_dim)
    return fuses_rope_of_heads(num_heads, num_kv_heads // together, head_dim * together)


def has_clusters(head_dim: int) -> bool:
    """True if such heads have kernels for few requests."""
    return head_dim == HEAD_DIM


def most_in_clusters(shares: ShareKernel, max_tokens: int) -> int:
    """The most requests x KV heads that clusters serve faster, where a request has up to `max_tokens` tokens; `shares`
    serves the same heads."""
    if max_tokens > LONG_TOKENS:
        return MOST_SEQUENCES_OF_LONG
    return MOST_SEQUENCES if shares.is_alone else MOST_SEQUENCES_OF_FEW_HEADS


def pays_together(num_sequences: int, tokens: int) -> bool:
    """True if clusters are faster at a verify step with a request's tokens together than with each as a decode.

    Together keys are read once, but all blocks of a cluster add up the sums of more queries. With 32/8 heads and 512
    tokens a layer takes, of requests x tokens, together (as decodes, behind a write): 1 x 8 9.3 µs (10.1), 1 x 16 12.3
    (10.6), 8 x 4 13.4 (19.2), 32 x 2 26.3 (23.6), 32 x 4 29.4 (33.6), 64 x 2 42.6 (36.8), 64 x 4 51.4 (77.6). All are
    in docs/lab/attention.md.

    Args:
        num_sequences: requests x KV heads.
        tokens: of each request.
    """
    if num_sequences > SIDE_BY_SIDE:
        return tokens > 2
    return tokens <= 8 or num_sequences * tokens > SIDE_BY_SIDE


def kernel_from_json(data: Mapping[str, Any]) -> DecodeKernel:
    """Reads what `to_json` wrote. Raises KeyError or ValueError for anything else."""
    return from_json(_KERNELS[data["source"]], {name: value for name, value in data.items() if name != "source"})
