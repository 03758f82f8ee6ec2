"""The one file that says which requests may share keys and values in the prefix cache."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mllm_compile.adapters.registry import Adapter

_EPOCH = "weights"


def request_salt(cache_salt: str | None, adapter: Adapter | None) -> tuple[Hashable, ...]:
    """All that changes a request's keys and values besides its tokens and images, under the weights that were loaded:
    requests with equal salts share them.

    Args:
        cache_salt: the caller's own.
        adapter: counts by its files, so that the same version by two names is one.
    """
    salt: tuple[Hashable, ...] = () if cache_salt is None else (cache_salt,)
    return salt if adapter is None else (*salt, ("adapter", adapter.digest))  # no text is equal to a tuple


def read_salt(salt: tuple[Hashable, ...]) -> tuple[str | None, str | None, int]:
    """The caller's own salt, the digest of the adapter, and the epoch that a salt was made of."""
    parts = {part[0]: part[1] for part in salt if isinstance(part, tuple)}
    return next((part for part in salt if isinstance(part, str)), None), parts.get("adapter"), parts.get(_EPOCH, 0)


def at_epoch(salt: tuple[Hashable, ...], epoch: int) -> tuple[Hashable, ...]:
    """The same under other weights: those of the `epoch`th update from which on prefixes are kept apart; 0: those that
    were loaded."""
    of_request = salt[1:] if salt and isinstance(salt[0], tuple) and salt[0][0] == _EPOCH else salt
    return ((_EPOCH, epoch), *of_request) if epoch else of_request
