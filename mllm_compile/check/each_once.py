"""Pairs layers with what they attend by, each of these once: what one layer has shown is true of all that share it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from mllm_compile.runtime.attention.layer import LayerSpec

Forms = TypeVar("Forms")


def each_once(layers: Iterable[LayerSpec], forms_of: Mapping[str, Forms]) -> Iterator[tuple[LayerSpec, Forms]]:
    """The first layer with each of the forms, which are layers' by name; layers without any are left out."""
    seen: set[Forms] = set()
    for layer in layers:
        forms = forms_of.get(layer.name)
        if forms is not None and forms not in seen:
            seen.add(forms)
            yield layer, forms
