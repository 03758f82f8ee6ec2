"""The interface of attention backends.

A layer is data (layer.py); a backend holds the plan of the current step and turns q, k, v of that step into the
attention's output over the paged cache. The metadata of a step is built in metadata.py; the op that calls a backend is
in ops/attention.py.

Shape legend: T tokens, R requests, H query heads, Hk kv heads, D query/key head dim, Dv value head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mllm_compile.runtime.attention.layer import AttentionLayer

if TYPE_CHECKING:
    from mllm_compile.runtime.attention.metadata import StepPrompts
    from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode


@dataclass(frozen=True)
class Unrotated:
    """Queries, keys and values of a step's tokens before their norms, their rotation and the write into the cache.

    Attributes:
        q: [1, T, H, D]; k: [1, T, Hk, D]; v: [T, Hk, D]; tokens may have any stride.
        cos, sin: [1, T, D], contiguous.
        q_weight, k_weight: [D] of the RMS norms before the rotation, or neither.
        eps: theirs.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], v: torch.Tensor, eps: float) -> Unrotated:
        """Takes q, k, cos and sin, then the norms' weights if there are any: the order in which ops pass them."""
        q, k, cos, sin, *weights = tensors
        q_weight, k_weight = weights or (None, None)
        return cls(q, k, v, cos, sin, q_weight, k_weight, eps)


# Not frozen, though it does not change: there is one for each layer of a step, and freezing makes it 3 times as slow to
# make (1.1 µs in place of 0.4).
@dataclass(slots=True, eq=False)
class AttentionInputs:
    """One layer's attention in a step.

    Attributes:
        q: [T, H, D]; k: [T, Hk, D]; v: [T, Hk, Dv]; k and v are in the cache already.
        out: [T, H, Dv], written.
        batch: the one that was planned.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    layer: AttentionLayer
    batch: ForwardBatch


class AttentionBackend(ABC):
    """Attends over the paged cache. One instance serves every layer; init_forward_metadata runs once per batch."""

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan `batch`: everything that its layers share. Must not wait for the device."""

    @abstractmethod
    def forward_extend(self, inputs: AttentionInputs) -> None:
        """EXTEND and MIXED: causal over each request's prefix and new tokens, whose k and v are in the cache."""

    @abstractmethod
    def forward_decode(self, inputs: AttentionInputs) -> None:
        """DECODE: like forward_extend with one token a request, T == R."""

    def forward(self, inputs: AttentionInputs) -> None:
        """Dispatches by the batch's mode."""
        run = self.forward_decode if inputs.batch.forward_mode.is_decode() else self.forward_extend
        run(inputs)

    def cascade_pays(self, num_requests: int, num_tokens: int, is_captured: bool = False) -> bool:
        """True if decodes of so many requests whose first `num_tokens` lie in the same pages are faster where these are
        read once: in a step that is not captured whole and says so (ForwardBatch.common_prefix_len), or in a captured
        decode made for it (use_cascade)."""
        return False

    @property
    def query_blocks(self) -> float:
        """Blocks of 128 queries of one prompt that the device attends for side by side; 0: not known."""
        return 0.0

    @property
    def captures_cascade(self) -> bool:
        """True if `use_cascade` may be called."""
        return False

    def use_cascade(self) -> None:
        """Make the decodes that were planned for a capture read what they begin with in common once."""
        raise NotImplementedError(f"{type(self).__name__} captures no cascades")

    def share_prefix(self, num_tokens: int) -> None:
        """Say how many first tokens the requests of the next replay of such a capture have in the same pages."""
        raise NotImplementedError(f"{type(self).__name__} captures no cascades")

    def rotates(self, layer: AttentionLayer) -> bool:
        """True if the planned batch goes to forward_unrotated."""
        return False

    def forward_unrotated(
        self, unrotated: Unrotated, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        """DECODE by a kernel that norms and rotates q and k and writes k and v into the cache; out [R, H, D]."""
        raise NotImplementedError(f"{type(self).__name__} is given queries that are rotated")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The sequence length that padding rows of a captured batch carry; their outputs may be anything."""
        raise NotImplementedError(f"{type(self).__name__} does not run inside CUDA graphs")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the persistent buffers that captured kernels read."""
        raise NotImplementedError(f"{type(self).__name__} does not run inside CUDA graphs")

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
    ) -> None:
        """Plan a batch of `bs` padded rows for capture."""
        raise NotImplementedError(f"{type(self).__name__} does not run inside CUDA graphs")

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        forward_mode: ForwardMode,
        seq_lens_cpu: torch.Tensor,
    ) -> None:
        """Plan again before a replay: the captured kernels read what this writes."""
        raise NotImplementedError(f"{type(self).__name__} does not run inside CUDA graphs")

    @property
    def page_table(self) -> torch.Tensor | None:
        """[max requests, W] int32: what captured decodes read pages from, where this and the lengths that they were
        captured with are all that a replay has to find up to date; None: it needs
        init_forward_metadata_replay_cuda_graph."""
        return None

    @property
    def mixed_obstacle(self) -> str | None:
        """Why steps with prompts cannot be captured whole, decodes among them or not; None: they can."""
        return f"{type(self).__name__} captures no prompts"

    def prompt_work_bytes(self, extends: bool) -> int:
        """Bytes of what kernels read of a captured step of prompts alone; 0: such a step is not captured.

        Args:
            extends: some go on from what is in the cache; else each begins with its first token.
        """
        return 0

    def init_forward_metadata_capture_prompts(self, num_tokens: int, work: torch.Tensor, extends: bool) -> None:
        """Plan such a step of `num_tokens` for capture.

        Args:
            work: [≥ prompt_work_bytes] uint8, aligned to 256 bytes: where kernels will find what write_prompt_work
                makes.
        """
        raise NotImplementedError(f"{type(self).__name__} captures no prompts")

    def write_prompt_work(self, num_tokens: int, memory: np.ndarray, prompts: StepPrompts) -> bool:
        """Write what a replay of the step of `num_tokens` reads, which was captured with or without extends as
        `prompts` has any; False: the captured kernels do not serve these well.

        Args:
            memory: [≥ prompt_work_bytes] uint8.
        """
        raise NotImplementedError(f"{type(self).__name__} captures no prompts")

    def reads_pages(self, batch: ForwardBatch) -> bool:
        """False: no layer reads keys or values of `batch` where the table of slots says that they are."""
        return True

    def runs_well_captured(self, batch: ForwardBatch) -> bool:
        """True if a captured kernel serves the prompts of `batch` about as fast as any other would."""
        raise NotImplementedError(f"{type(self).__name__} captures no steps with prompts")

    def init_forward_metadata_capture_mixed(self, num_tokens: int) -> None:
        """Plan a step of `num_tokens` for capture; it will serve any decodes and prompts of as many tokens or fewer."""
        raise NotImplementedError(f"{type(self).__name__} captures no steps with prompts")

    def begin_captured_mixed(self, num_tokens: int, rows: torch.Tensor) -> None:
        """Put on the stream what such a capture begins with.

        Args:
            rows: [N] int64, the requests' rows of the table of slots at each replay; 0 of padding, up to as many as the
                step may have.
        """
        raise NotImplementedError(f"{type(self).__name__} captures no steps with prompts")

    def init_forward_metadata_replay_mixed(self, num_tokens: int, batch: ForwardBatch) -> None:
        """Plan again before a replay of the captured step of `num_tokens`, for `batch`, EXTEND or MIXED."""
        raise NotImplementedError(f"{type(self).__name__} captures no steps with prompts")
