"""The kinds of graphs, the modes that steps run in, and the key under which a graph is found. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from mllm_compile.runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch


class CUDAGraphMode(Enum):
    """NONE, PIECEWISE and FULL are what a step runs in; the pairs say (uniform decode, everything else)."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    @classmethod
    def from_name(cls, name: str) -> CUDAGraphMode:
        """The mode of a config value such as 'full_and_piecewise'.

        Raises:
            ConfigError: no mode has that name.
        """
        try:
            return cls[name.upper()]
        except KeyError:
            names = ", ".join(mode.name.lower() for mode in cls)
            raise ConfigError(f"cudagraph.mode: expected one of {names}, got {name!r}") from None

    @property
    def is_runtime_mode(self) -> bool:
        """True if a step can run in it: a pair must first be resolved by decode_mode or mixed_mode."""
        return not isinstance(self.value, tuple)

    def decode_mode(self) -> CUDAGraphMode:
        """The mode of a uniform decode batch."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> CUDAGraphMode:
        """The mode of any other batch."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def captures(self, kind: GraphKind) -> bool:
        """True if a model whose config has this mode may have graphs of the kind."""
        if kind.is_decode or kind in (GraphKind.VERIFY, GraphKind.PIECEWISE):
            return kind.mode in (self.decode_mode(), self.mixed_mode())
        return self in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE)


class GraphKind(Enum):
    """The steps that a captured graph serves. cuda_graph/kinds.py has a row for each.

    A MIXED graph (cudagraph.mixed_tokens) serves any step: so it is wider than ForwardMode.MIXED, which means decodes
    and prompts in one batch.
    """

    PIECEWISE = auto()  # the pieces of any step, between layers of attention that are launched
    MIXED = auto()  # any step, up to its head
    PREFILL_NEW = auto()  # prompts alone, each from its first token on
    PREFILL_CACHED = auto()  # prompts alone, some behind a prefix in the cache
    DECODE = auto()  # decodes alone
    CASCADE = auto()  # decodes that begin with the same pages
    DECODE_GREEDY_ACROSS_RANKS = auto()  # decodes whose likeliest tokens the ranks choose together, without all logits
    CASCADE_GREEDY_ACROSS_RANKS = auto()
    VERIFY = auto()  # decodes with drafts alone, all padded to as many tokens

    __hash__ = object.__hash__  # members are compared by identity; Enum's own is a call of Python for each piece

    @property
    def mode(self) -> CUDAGraphMode:
        """The mode of a step of the kind."""
        return CUDAGraphMode.PIECEWISE if self is GraphKind.PIECEWISE else CUDAGraphMode.FULL

    @property
    def is_decode(self) -> bool:
        """True if every request has one token."""
        return self in (GraphKind.DECODE, GraphKind.DECODE_GREEDY_ACROSS_RANKS) or self.shares_prefix

    @property
    def shares_prefix(self) -> bool:
        """True if requests begin with the same pages, which are read once for all."""
        return self in (GraphKind.CASCADE, GraphKind.CASCADE_GREEDY_ACROSS_RANKS)

    @property
    def is_greedy_across_ranks(self) -> bool:
        """True if the graph gives tokens, and each rank's part of the logits."""
        return self in (GraphKind.DECODE_GREEDY_ACROSS_RANKS, GraphKind.CASCADE_GREEDY_ACROSS_RANKS)


@dataclass(frozen=True)
class BatchDescriptor:
    """The padded shape of a batch, and the kind of graph that it runs in."""

    num_tokens: int  # padded
    num_reqs: int | None = None  # padded; None: any number, which decodes alone do not take
    kind: GraphKind = GraphKind.PIECEWISE
    has_lora: bool = False  # some request has an adapter
    num_active_loras: int = 0  # most different adapters of its requests

    @property
    def uniform(self) -> bool:
        """True if every request has the same query length."""
        return self.kind.is_decode or self.kind is GraphKind.VERIFY


@dataclass(frozen=True, slots=True)
class UBatchSlice:
    """One of the parts of a step that run beside each other. A request may be in two: the later part has its later
    tokens, and sees the earlier part's in the KV cache.

    Attributes:
        request_slice: of the R requests; token_slice: of the T tokens.
    """

    request_slice: slice
    token_slice: slice


@dataclass(frozen=True, slots=True)
class DPMetadata:
    """The tokens of a step on ranks that have requests of their own, and exchange tokens for their experts.

    All run the step with as many tokens as the largest has, padding included, and so pick the same graph. A step of a
    rank without requests is IDLE: it computes a token of the dummy row.

    Attributes:
        num_tokens_across_dp: of each rank, without padding.
    """

    num_tokens_across_dp: tuple[int, ...]

    @property
    def max_tokens_across_dp(self) -> int:
        """Tokens of the rank that has most; at least one."""
        return max(1, *self.num_tokens_across_dp)

    def mark_tokens(self, places: torch.Tensor) -> None:
        """Makes places [N * T] int64, of T tokens of each of N ranks with padding, 1 where there are tokens, else 0."""
        parts = places.view(len(self.num_tokens_across_dp), -1)
        places.zero_()
        for part, count in zip(parts, self.num_tokens_across_dp, strict=True):
            part[:count].fill_(1)
