"""Contracts of an attention backend beyond attention itself: one for each kind of captured step or further kernel.

A backend names each of them (base.py), and says None where it does not serve it. Contracts are abstract throughout, so
a backend that hands on to another cannot leave a method out.

Shape legend: T tokens, R requests, H query heads, Hk kv heads, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from mllm_compile.runtime.attention.layer import AttentionLayer

if TYPE_CHECKING:
    from mllm_compile.runtime.attention.metadata import StepPrompts
    from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode

Capture = TypeVar("Capture")


def needed(capture: Capture | None) -> Capture:
    """A backend's contract, of a kind of graph whose sizes say that there is one.

    Raises:
        RuntimeError: it is None.
    """
    if capture is None:
        raise RuntimeError("the attention backend does not capture such steps: ask for the contract first")
    return capture


@dataclass(frozen=True)
class RopeInputs:
    """Queries, keys and values of a step's tokens before their norms, their rotation and the write into the cache.

    Attributes:
        q: [1, T, H, D]; k: [1, T, Hk, D]; v: [T, Hk, D]; tokens may have any stride.
        cos, sin: [1, T, D], contiguous; neither where heads do not rotate.
        q_weight, k_weight: [D] of the RMS norms before the rotation, or neither.
        eps: theirs.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], v: torch.Tensor, eps: float) -> RopeInputs:
        """Takes q and k, then cos and sin and the norms' weights if there are any: the order in which ops pass them."""
        q, k, *angles = tensors
        cos, sin, *weights = angles or (None, None)
        q_weight, k_weight = weights or (None, None)
        return cls(q, k, v, cos, sin, q_weight, k_weight, eps)


class FusesRope(ABC):
    """Kernels of decodes that norm and rotate q and k, and write k and v into the cache."""

    @abstractmethod
    def fuses_rope(self, layer: AttentionLayer) -> bool:
        """True if the planned batch goes to forward_with_rope."""

    @abstractmethod
    def forward_with_rope(
        self, rope_inputs: RopeInputs, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        """DECODE by such a kernel; out [R, H, D]."""


class Cascades(ABC):
    """Decodes that begin with the same pages, read once for all of them (ForwardBatch.common_prefix_len)."""

    @abstractmethod
    def cascade_pays(self, num_requests: int, num_tokens: int, is_captured: bool = False) -> bool:
        """True if decodes of so many requests that share their first `num_tokens` are faster so.

        Args:
            is_captured: in a captured decode made for it (CapturesCascades); else in a step that is not captured whole.
        """


class CapturesDecodes(ABC):
    """Decodes in a CUDA graph."""

    @property
    @abstractmethod
    def page_table(self) -> torch.Tensor | None:
        """[max requests, W] int32: the page table of captured decodes, if a replay needs only this and the captured
        lengths up to date; None: it needs init_forward_metadata_replay_cuda_graph."""

    @abstractmethod
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The sequence length that padding rows of a captured batch carry; their outputs may be anything."""

    @abstractmethod
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the persistent buffers that captured kernels read."""

    @abstractmethod
    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
    ) -> None:
        """Plan a batch of `bs` padded rows for capture."""

    @abstractmethod
    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        seq_lens_cpu: torch.Tensor,
    ) -> None:
        """Plan again before a replay: the captured kernels read what this writes."""


class CapturesCascades(ABC):
    """Decodes in a CUDA graph that read a shared prefix once, beside CapturesDecodes' own."""

    @abstractmethod
    def use_cascade(self) -> None:
        """Make the decodes that were planned for a capture read what they begin with in common once."""

    @abstractmethod
    def share_prefix(self, num_tokens: int) -> None:
        """Say how many first tokens the requests of the next replay of such a capture have in the same pages."""


class CapturesVerify(ABC):
    """Verify steps in a CUDA graph, beside CapturesDecodes, whose page table they read: rows of one token, as many of
    each request, one behind another. A row sees the new keys of its request's rows before it."""

    @abstractmethod
    def init_forward_metadata_capture_verify(self, num_rows: int, num_tokens: int, seq_lens: torch.Tensor) -> None:
        """Plan a step of `num_rows` for capture; replays need no plan.

        Args:
            num_tokens: rows of a request.
            seq_lens: [num_rows] int32: keys that each row sees, up to its own; 0 of padding. Read at each replay.
        """

    @abstractmethod
    def begin_captured_verify(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Put on the stream what such a capture begins with, behind its inputs.

        Args:
            rows: [R, C] int64, each token's row of the table of slots, at each replay; 0 of padding.
            seq_lens: [R, C] int32, as above.
        """


class CapturesMixed(ABC):
    """Steps with prompts in a CUDA graph, with decodes among them or not."""

    @abstractmethod
    def runs_well_captured(self, batch: ForwardBatch) -> bool:
        """True if a captured kernel serves the prompts of `batch` about as fast as any other would."""

    @abstractmethod
    def init_forward_metadata_capture_mixed(self, num_tokens: int) -> None:
        """Plan a step of `num_tokens` for capture; it will serve any decodes and prompts of as many tokens or fewer."""

    @abstractmethod
    def begin_captured_mixed(self, num_tokens: int, rows: torch.Tensor) -> None:
        """Put on the stream what such a capture begins with.

        Args:
            rows: [N] int64, the requests' rows of the table of slots at each replay; 0 of padding, up to as many as the
                step may have.
        """

    @abstractmethod
    def init_forward_metadata_replay_mixed(self, num_tokens: int, batch: ForwardBatch) -> None:
        """Plan again before a replay of the captured step of `num_tokens`, for `batch`, EXTEND or MIXED."""


class CapturesPrompts(ABC):
    """Prompts alone in a CUDA graph, which read their work from the step's inputs."""

    @abstractmethod
    def prompt_work_bytes(self, has_prefix: bool) -> int:
        """Bytes of what kernels read of such a step.

        Args:
            has_prefix: some prompts go on from what is in the cache; else each begins with its first token.
        """

    @abstractmethod
    def init_forward_metadata_capture_prompts(self, num_tokens: int, work: torch.Tensor, has_prefix: bool) -> None:
        """Plan such a step of `num_tokens` for capture.

        Args:
            work: [≥ prompt_work_bytes] uint8, aligned to 256 bytes: where kernels will find what write_prompt_work
                makes.
        """

    @abstractmethod
    def write_prompt_work(self, num_tokens: int, memory: np.ndarray, prompts: StepPrompts) -> bool:
        """Write what a replay of the step of `num_tokens` reads, which was captured with or without prefixes as
        `prompts` has any; False: the captured kernels do not serve these well.

        Args:
            memory: [≥ prompt_work_bytes] uint8.
        """
