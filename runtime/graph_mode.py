"""The kinds of graphs, which one a step runs in, and the key under which it is found. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from mllm_compile.runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch


class CUDAGraphMode(Enum):
    """NONE, PIECEWISE and FULL are what a step runs in; the pairs say (uniform decode, everything else).

    There are two kinds of FULL graphs, told apart by BatchDescriptor.uniform: those of decodes, and *mixed* ones
    (cudagraph.mixed_tokens), which hold any step up to its head. So "mixed" is wider here than ForwardMode.MIXED, which
    means decodes and prompts in one batch: a mixed graph also serves prompts alone. Two more kinds, of sizes of their
    own, are for prompts alone: *fresh* ones if each begins with its first token, *extends* if some have a prefix.
    """

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


@dataclass(frozen=True)
class BatchDescriptor:
    """The padded shape of a batch."""

    num_tokens: int  # padded
    num_reqs: int | None = None  # padded; None: any number, for PIECEWISE, and for FULL of any step
    uniform: bool = False  # every request has the same query length
    has_lora: bool = False
    num_active_loras: int = 0
    cascade: bool = False  # decodes that begin with the same pages
    fresh: bool = False  # prompts alone, each from its first token on
    extends: bool = False  # prompts alone, of which some go on from what is in the cache
    tokens_alone: bool = False  # decodes whose most probable tokens ranks choose together, without gathering logits


@dataclass(frozen=True, slots=True)
class UBatchSlice:
    """One of the parts of a step that run beside each other. A request may be in two: the later part has its later
    tokens, and sees those of the earlier one in the KV cache.

    Attributes:
        request_slice: of the R requests; token_slice: of the T tokens.
    """

    request_slice: slice
    token_slice: slice


@dataclass(frozen=True, slots=True)
class DPMetadata:
    """The tokens of a step on ranks that have requests of their own, and exchange tokens for their experts.

    All run the step with as many tokens as the largest has, padding included, and so pick the same graph; a rank
    without requests computes a token of the dummy row.

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
