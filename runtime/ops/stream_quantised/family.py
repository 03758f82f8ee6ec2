"""The kernels of streamed linears in few bits, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops.stream_linear.family import StreamedFamily
from mllm_compile.runtime.ops.stream_quantised.linear import QuantisedKind, QuantisedTiling
from mllm_compile.runtime.ops.stream_quantised.shapes import MAX_TOKENS, choose_tiling, most_tokens, tiling_from_json


class Family(StreamedFamily):
    """The kernels of fp8 weights and of four-bit integers."""

    prefix: ClassVar[str] = "stream_quantised_linear"
    module: ClassVar[str] = "mllm_compile.runtime.ops.stream_quantised.ops"

    def choose(self, kind: QuantisedKind, tokens: int) -> QuantisedTiling:
        return choose_tiling(kind, tokens)

    def step_sizes(self, kernels: Sequence[CudaKernel]) -> Sequence[int]:
        largest = [one for one in kernels if isinstance(one, QuantisedTiling) and one.tokens == MAX_TOKENS]
        return sorted({*super().step_sizes(kernels), *(most_tokens(one.kind) for one in largest)})

    def from_json(self, data: Mapping[str, Any]) -> QuantisedTiling:
        return tiling_from_json(data)
