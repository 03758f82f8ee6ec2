"""Maps a batch's shape to the graph that it runs in. Pure Python: no torch, no device.

Preference: FULL of a uniform decode (next captured number of requests), then FULL of any step (next captured number of
tokens, any number of requests), PIECEWISE (likewise), NONE (above the largest size, or nothing captured).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from mllm_compile.runtime.errors import CaptureSizeError
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode


class GraphDispatcher:
    """Maps (tokens, requests, uniform) to (runtime mode, descriptor).

    Attributes:
        piecewise_tokens: captured token counts, ascending; empty when the mode has no piecewise graphs.
        decode_requests: captured request counts of full decode graphs, ascending; likewise.
        mixed_tokens: captured token counts of full graphs of any step, ascending; there may be none.
        cascade_requests: those of decode_requests that are captured once more, for decodes that begin with the same
            pages; there may be none.
        fresh_tokens: captured token counts of full graphs of prompts alone, each from its first token on, ascending;
            likewise.
        extend_tokens: those of which some go on from what is in the cache.
        tokens_alone: decodes are captured once more without their logits.
    """

    def __init__(
        self,
        mode: CUDAGraphMode,
        piecewise_tokens: Sequence[int] = (),
        decode_requests: Sequence[int] = (),
        mixed_tokens: Sequence[int] = (),
        cascade_requests: Sequence[int] = (),
        fresh_tokens: Sequence[int] = (),
        extend_tokens: Sequence[int] = (),
        tokens_alone: bool = False,
    ) -> None:
        """
        Raises:
            CaptureSizeError: a size is not positive, or the mode needs sizes and there are none.
        """
        self.mode, self.tokens_alone = mode, tokens_alone
        self.decode_requests = self._sizes("cudagraph.decode_requests", decode_requests, CUDAGraphMode.FULL)
        self.piecewise_tokens = self._sizes("cudagraph.piecewise_tokens", piecewise_tokens, CUDAGraphMode.PIECEWISE)
        # Unlike the other sizes they may be left out; in a mode without full graphs of prompts they are ignored.
        takes_mixed = mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE)
        key = "cudagraph.mixed_tokens"
        self.mixed_tokens = self._sizes(key, mixed_tokens, CUDAGraphMode.FULL) if mixed_tokens and takes_mixed else ()
        self.cascade_requests = tuple(sorted(set(self.decode_requests) & set(cascade_requests)))
        self.fresh_tokens = tuple(sorted(set(fresh_tokens))) if takes_mixed else ()  # no setting has these
        self.extend_tokens = tuple(sorted(set(extend_tokens))) if takes_mixed else ()

    def dispatch(
        self, num_tokens: int, num_reqs: int, uniform: bool, may_mix: bool = True
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """The graph for a batch.

        Args:
            num_tokens: tokens of the batch, without padding.
            num_reqs: its requests.
            uniform: every request brings one token (a pure decode).
            may_mix: a full graph of any step may serve it.

        Returns:
            FULL with the padded request count, FULL or PIECEWISE with the padded token count and num_reqs None, or NONE
            with the batch's own shape.
        """
        if uniform and num_tokens == num_reqs:
            padded = _next(self.decode_requests, num_reqs)
            if padded is not None:
                return CUDAGraphMode.FULL, BatchDescriptor(padded, num_reqs=padded, uniform=True)
        padded = _next(self.mixed_tokens, num_tokens) if may_mix else None
        if padded is not None:
            return CUDAGraphMode.FULL, BatchDescriptor(padded)
        padded = _next(self.piecewise_tokens, num_tokens)
        if padded is not None:
            return CUDAGraphMode.PIECEWISE, BatchDescriptor(padded)
        return CUDAGraphMode.NONE, BatchDescriptor(num_tokens, num_reqs=num_reqs, uniform=uniform)

    def dispatch_cascade(self, num_reqs: int) -> BatchDescriptor | None:
        """The FULL graph of a decode whose requests begin with the same pages; None: none holds so many."""
        padded = _next(self.cascade_requests, num_reqs)
        return None if padded is None else BatchDescriptor(padded, num_reqs=padded, uniform=True, cascade=True)

    def dispatch_prompts(self, num_tokens: int, extends: bool) -> BatchDescriptor | None:
        """The FULL graph of prompts alone; None: none holds so many tokens.

        Args:
            extends: some go on from what is in the cache; else each begins with its first token.
        """
        padded = _next(self.extend_tokens if extends else self.fresh_tokens, num_tokens)
        return None if padded is None else BatchDescriptor(padded, fresh=not extends, extends=extends)

    def descriptors(self) -> list[tuple[CUDAGraphMode, BatchDescriptor]]:
        """Everything to capture, largest first: later captures then fit into memory that earlier ones took."""
        full = [(CUDAGraphMode.FULL, BatchDescriptor(n, num_reqs=n, uniform=True)) for n in self.decode_requests]
        piecewise = [(CUDAGraphMode.PIECEWISE, BatchDescriptor(n)) for n in self.piecewise_tokens]
        mixed = [(CUDAGraphMode.FULL, BatchDescriptor(n)) for n in self.mixed_tokens]
        mixed += [(CUDAGraphMode.FULL, BatchDescriptor(n, fresh=True)) for n in self.fresh_tokens]
        mixed += [(CUDAGraphMode.FULL, BatchDescriptor(n, extends=True)) for n in self.extend_tokens]
        cascades = [(CUDAGraphMode.FULL, replace(entry[1], cascade=True)) for entry in full]
        full += [entry for entry in cascades if entry[1].num_reqs in self.cascade_requests]
        if self.tokens_alone:
            full += [(mode, replace(descriptor, tokens_alone=True)) for mode, descriptor in full]
        return sorted([*piecewise, *mixed, *full], key=lambda entry: -entry[1].num_tokens)

    def _sizes(self, key: str, sizes: Sequence[int], kind: CUDAGraphMode) -> tuple[int, ...]:
        if kind not in (self.mode.decode_mode(), self.mode.mixed_mode()):
            return ()
        if not sizes or min(sizes) < 1:
            raise CaptureSizeError(
                f"{key}: expected positive sizes for cudagraph.mode {self.mode.name.lower()}, got {list(sizes)}. "
                "Give some, or set cudagraph.mode: none."
            )
        return tuple(sorted(set(sizes)))


def _next(sizes: tuple[int, ...], wanted: int) -> int | None:
    """The smallest of ascending `sizes` that holds `wanted`."""
    place = bisect_left(sizes, wanted)
    return sizes[place] if place < len(sizes) else None
