"""Pairs each distinct set of kernels with one layer: its result holds for all layers that share them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from mllm_compile.runtime.attention.layer import LayerSpec

Kernels = TypeVar("Kernels")


def one_layer_per_kernel(
    layers: Iterable[LayerSpec], kernels_of: Mapping[str, Kernels]
) -> Iterator[tuple[LayerSpec, Kernels]]:
    """The first layer of each distinct set of kernels, which are given by layer name; layers without any are left
    out."""
    seen: set[Kernels] = set()
    for layer in layers:
        kernels = kernels_of.get(layer.name)
        if kernels is not None and kernels not in seen:
            seen.add(kernels)
            yield layer, kernels
