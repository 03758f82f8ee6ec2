"""The sizes and types that kernels of attention are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Served:
    """
    Attributes:
        page_size: tokens of a KV page.
        dtype: the type of queries.
        cache_dtype: the type of keys and values.
    """

    page_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
