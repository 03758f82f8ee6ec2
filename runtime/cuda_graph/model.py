"""The part of a ModelRunner that a GraphRunner captures and uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from mllm_compile.runtime.attention.base import AttentionBackend
from mllm_compile.runtime.collectives.base import Communicator
from mllm_compile.runtime.collectives.choose import TokenChoice
from mllm_compile.runtime.forward_batch import ForwardBatch, LogitsProcessorOutput
from mllm_compile.runtime.forward_context import ForwardTimes
from mllm_compile.runtime.memory_pool import GDNPool, KVPool, ReqToTokenPool
from mllm_compile.runtime.program.loaded import LoadedModel
from mllm_compile.runtime.program.runner import ProgramRunner
from mllm_compile.runtime.program.seen_images import ImageAttention
from mllm_compile.runtime.program.sources import SourceAttention
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.runtime.sampling.state import RowState

if TYPE_CHECKING:
    from mllm_compile.runtime.cuda_graph.verify_loop import StepTensors


class ChainedDrafts(Protocol):
    """Drafts that are made behind a captured verify step, in its graph; draft_chain.py has the class."""

    @property
    def keys_ahead(self) -> int: ...

    def holds(self, num_requests: int, width: int) -> bool: ...

    def give(self, step: StepTensors) -> None: ...

    def read(self, hidden_states: torch.Tensor, num_requests: int, width: int) -> None: ...

    def run(self, step: StepTensors, width: int) -> None: ...

    def fault(self, step: StepTensors, width: int) -> str | None: ...

    def drafts_of(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[int]]: ...


class CapturableModel(Protocol):
    """A loaded model with its memory and attention; ModelRunner's methods are documented there."""

    config: RunnerConfig
    device: torch.device
    model: LoadedModel
    program: ProgramRunner
    attn_backend: AttentionBackend
    source_attention: SourceAttention | None
    image_attention: ImageAttention | None
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVPool
    state_pool: GDNPool
    row_state: RowState
    forward_times: ForwardTimes | None
    expert_counts: dict[str, torch.Tensor] | None
    communicator: Communicator | None
    forward_pass_id: int
    draft_chain: ChainedDrafts | None

    @property
    def always_takes_features(self) -> bool: ...

    @property
    def always_takes_adapters(self) -> bool: ...

    @property
    def dp_size(self) -> int: ...

    def prepare_forward_batch_decode(
        self,
        input_ids: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        *,
        positions: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
    ) -> ForwardBatch: ...

    def prepare_forward_batch_extend(
        self,
        input_ids: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        extend_seq_lens_cpu: torch.Tensor,
        extend_prefix_lens_cpu: torch.Tensor,
    ) -> ForwardBatch: ...

    @property
    def choice(self) -> TokenChoice | None: ...

    def broadcast_tokens(self) -> None: ...

    def broadcast(self, x: torch.Tensor) -> None: ...

    def keep_states(self, counts: torch.Tensor) -> None: ...

    def plan_attention(self, batch: ForwardBatch) -> None: ...

    def run_eager(self, batch: ForwardBatch) -> LogitsProcessorOutput: ...
