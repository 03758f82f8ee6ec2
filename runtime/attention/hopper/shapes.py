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


def pays_together(num_sequences: int, tokens: int) -> bool:
    """True if clusters are faster at a verify step with a request's tokens together than with each as a decode.

    Together keys are read once, but all blocks of a cluster add up the sums of more queries. That pays where the tokens
    would not run side by side as decodes, but the clusters do; or of so many that reading again takes longer. With 32/8
    heads and 512 tokens a layer takes, of requests x tokens, together (as decodes, behind a write): 1 x 4 8.7 µs (8.4),
    8 x 4 15.8 (19.9), 16 x 4 18.6 (23.0), 32 x 2 27.8 (23.4), 32 x 4 34.1 (33.7), 32 x 8 49.2 (68.1), 64 x 4 60.5
    (77.7). All are in docs/lab/attention.md; at 8 x 8 it is even (23.2, 23.0).

    Args:
        num_sequences: requests x KV heads.
        tokens: of each request.
    """
    num_decodes = num_sequences * tokens
    return num_decodes > SIDE_BY_SIDE and (num_sequences <= SIDE_BY_SIDE or num_decodes > 8 * SIDE_BY_SIDE)


def kernel_from_json(data: Mapping[str, Any]) -> DecodeKernel:
    """Reads what `to_json` wrote. Raises KeyError or ValueError for anything else."""
    return from_json(_KERNELS[data["source"]], {name: value for name, value in data.items() if name != "source"})
