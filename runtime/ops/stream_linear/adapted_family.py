"""The kernels of streamed linears with adapters, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.ops.stream_linear.adapted import (
    AdaptedKind,
    AdaptedRowTiling,
    AdaptedTileTiling,
    AdaptedTiling,
    choose,
)
from mllm_compile.runtime.ops.stream_linear.family import StreamedFamily

_TILINGS: dict[str, type[AdaptedTiling]] = {tiling.source: tiling for tiling in (AdaptedRowTiling, AdaptedTileTiling)}


class Family(StreamedFamily):
    """One kernel for each linear of a variant for up to 64 tokens with adapters."""

    prefix: ClassVar[str] = "stream_linear_lora"
    module: ClassVar[str] = "mllm_compile.runtime.ops.stream_linear.adapted_ops"

    def choose(self, kind: AdaptedKind, tokens: int) -> AdaptedTiling:
        return choose(kind, tokens)

    def from_json(self, data: Mapping[str, Any]) -> AdaptedTiling:
        values = {name: value for name, value in data.items() if name != "source"}
        return from_json(_TILINGS[data["source"]], values)
