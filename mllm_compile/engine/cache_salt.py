"""The one function that says which requests may share keys and values in the prefix cache."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mllm_compile.adapters.registry import Adapter


def request_salt(cache_salt: str | None, adapter: Adapter | None) -> tuple[Hashable, ...]:
    """All that changes a request's keys and values besides its tokens and images: requests with equal salts share them.

    Args:
        cache_salt: the caller's own.
        adapter: counts by its files, so that the same version by two names is one.
    """
    salt: tuple[Hashable, ...] = () if cache_salt is None else (cache_salt,)
    return salt if adapter is None else (*salt, ("adapter", adapter.digest))  # no text is equal to a tuple
