"""Kernels that the compiler writes or builds itself: no graph was traced for them.

ATTENTION_KERNELS is the one list of those that attention layers have. Each is a field of LayerKernels
(runtime/attention/layer_kernels.py). `<kind>_attention.py` here writes its pieces, by `add_<kind>_attention`;
`<kind>_attention.py` in check/ runs them, by `check_<kind>_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

# In the order in which they are written: a cascade and a prefill are beside a layer's decode.
ATTENTION_KERNELS = ("decode", "cascade", "prefill", "latent", "paged")


def of_every_kind(package: str, verb: str) -> list[Callable[..., Any]]:
    """The function `<verb>_<kind>_attention` of each kind, from the package's module of it."""
    names = [f"{kind}_attention" for kind in ATTENTION_KERNELS]
    return [getattr(import_module(f"{package}.{name}"), f"{verb}_{name}") for name in names]
