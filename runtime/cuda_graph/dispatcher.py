"""Finds the captured graph that a step fits, and says in which kind it runs. Pure Python: no torch, no device.

A decode takes the next captured number of requests; any other kind takes the next captured number of tokens. The
preference is DECODE, then MIXED, then PIECEWISE.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from mllm_compile.runtime.errors import CaptureSizeError
from mllm_compile.runtime.graph_mode import BatchDescriptor, GraphKind

# Kinds that run a ForwardBatch, the fastest first.
_OF_DECODES = (GraphKind.DECODE, GraphKind.MIXED, GraphKind.PIECEWISE)
_OF_STEPS = (GraphKind.MIXED, GraphKind.PIECEWISE)
_OF_PIECES = (GraphKind.PIECEWISE,)


class GraphDispatcher:
    """The captured sizes of every kind.

    Attributes:
        sizes: ascending, requests of decodes and tokens of other kinds; () of a kind that is not captured.
        num_loras: adapters that are in memory at once; 0 without adapters.
        forms: of each size: whether it is of steps with adapters.
    """

    def __init__(
        self, sizes: Mapping[GraphKind, Sequence[int]], num_loras: int = 0, always_takes_adapters: bool = False
    ) -> None:
        """
        Args:
            always_takes_adapters: steps without adapters run the program for adapters, too.
        """
        self.sizes = {kind: tuple(sorted(set(sizes.get(kind, ())))) for kind in GraphKind}
        self._num_shapes = {kind: len(sizes.get(kind, ())) for kind in GraphKind}
        self.num_loras = num_loras
        self.forms = (True,) if always_takes_adapters else (False, True) if num_loras else (False,)

    @property
    def decode_requests(self) -> tuple[int, ...]:
        """Sizes of decodes."""
        return self.sizes[GraphKind.DECODE]

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest graph; 0 without any."""
        return max((of_kind[-1] for of_kind in self.sizes.values() if of_kind), default=0)

    def find(self, kind: GraphKind, size: int, has_lora: bool = False) -> BatchDescriptor | None:
        """The smallest graph of a kind that holds so many requests of decodes, or tokens; None: none does."""
        padded = next_size(self.sizes[kind], size)
        if padded is None or has_lora not in self.forms:
            return None
        return self._descriptor(kind, padded, has_lora)

    def candidates(
        self, num_tokens: int, is_decode: bool = False, is_whole: bool = True, has_lora: bool = False
    ) -> Iterator[BatchDescriptor]:
        """The graphs that may run a step of so many tokens, the fastest first.

        Args:
            is_decode: every request has one token.
            is_whole: a whole graph has all that the step's attention and experts read.
            has_lora: some request has an adapter.
        """
        for kind in _OF_PIECES if not is_whole else _OF_DECODES if is_decode else _OF_STEPS:
            descriptor = self.find(kind, num_tokens, has_lora)
            if descriptor is not None:
                yield descriptor

    def descriptors(self) -> list[BatchDescriptor]:
        """All graphs, largest first: later captures then fit into memory that earlier ones took."""
        found = [
            self._descriptor(kind, size, has_lora)
            for kind, of_kind in self.sizes.items()
            for size in of_kind
            for has_lora in self.forms
        ]
        return sorted(found, key=lambda descriptor: -descriptor.num_tokens)

    def largest(self, count: int, kinds: Sequence[GraphKind]) -> GraphDispatcher:
        """The `count` largest sizes of each of these kinds."""
        sizes = {kind: self.sizes[kind][-count:] for kind in kinds}
        return GraphDispatcher(sizes, self.num_loras, self.forms == (True,))

    def num_graphs(self, kind: GraphKind) -> int:
        """Graphs of a kind: several shapes of verify steps may have as many tokens."""
        return self._num_shapes[kind] * len(self.forms)

    def _descriptor(self, kind: GraphKind, size: int, has_lora: bool) -> BatchDescriptor:
        num_reqs, num_loras = size if kind.is_decode else None, self.num_loras if has_lora else 0
        return BatchDescriptor(size, num_reqs, kind, has_lora, num_loras)


def next_size(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest of ascending `sizes` that holds `wanted`."""
    place = bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else None


def asked_sizes(key: str, sizes: Sequence[int], mode: str) -> Sequence[int]:
    """The sizes that a config asks for.

    Raises:
        CaptureSizeError: the list is empty, or a size is not positive.
    """
    if not sizes or min(sizes) < 1:
        raise CaptureSizeError(
            f"{key}: expected positive sizes for cudagraph.mode {mode}, got {list(sizes)}. "
            "Give some, or set cudagraph.mode: none."
        )
    return sizes
