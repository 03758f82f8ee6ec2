"""The backend of models with more than attention: each layer goes to the backend that computes its kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionBackend, AttentionInputs
from mllm_compile.runtime.attention.capture import (
    CapturesCascades,
    CapturesDecodes,
    CapturesMixed,
    CapturesPrompts,
    CapturesVerify,
    Cascades,
    FusesRope,
    needed,
)
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata, StepPrompts
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.state.base import StateBackend, StateInputs
from mllm_compile.runtime.state.held import HeldStates
from mllm_compile.runtime.state.mixed import MixedStates, MixedStateSteps, PromptStates


class HybridAttnBackend(AttentionBackend, CapturesDecodes, CapturesMixed, CapturesPrompts, CapturesVerify):
    """Attention layers go to an attention backend, layers with a state to theirs.

    Args:
        attention: plans and computes attention; None for a model without any.
        state: computes layers with a state. It plans nothing: StateMetadata is all that it reads of a batch.
        held: the states of verify steps.
        mixed: what it reads in captured steps with prompts; None: there are layers without kernels, and none can be
            captured.
        pages: [max requests, W] int32, of a model without attention: captured decodes that prepare their own inputs
            list pages, though none reads them.
    """

    def __init__(
        self,
        attention: AttentionBackend | None,
        state: StateBackend,
        held: HeldStates,
        mixed: MixedStateSteps | None = None,
        pages: torch.Tensor | None = None,
    ) -> None:
        self._attention = attention
        self._state = state
        self._held = held
        self._mixed = mixed
        self._pages = pages
        self._mixed_step: MixedStates | None = None  # what layers read of the batch

    def forward_state(self, inputs: StateInputs) -> None:
        """Computes a layer with a state."""
        if self._mixed_step is not None:
            inputs = replace(inputs, metadata=replace(inputs.metadata, mixed=self._mixed_step))
        self._state.forward(inputs)
        if inputs.metadata.num_held_tokens:
            self._held.hold(inputs)

    def keep_states(self, counts: torch.Tensor) -> None:
        """HeldStates.keep."""
        self._held.keep(counts)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._mixed_step = self._held.begin(batch)
        if self._attention is not None:
            self._attention.init_forward_metadata(batch)

    def forward_extend(self, inputs: AttentionInputs) -> None:
        self._of_attention.forward_extend(inputs)

    def forward_decode(self, inputs: AttentionInputs) -> None:
        self._of_attention.forward_decode(inputs)

    def writes_kv(self, layer: AttentionLayer) -> bool:
        return self._of_attention.writes_kv(layer)

    def reads_pages(self, batch: ForwardBatch) -> bool:
        return self._attention is not None and self._attention.reads_pages(batch)

    @property
    def query_blocks(self) -> float:
        return 0.0 if self._attention is None else self._attention.query_blocks

    # Of attention alone: layers with a state have no part in it.

    @property
    def rope(self) -> FusesRope | None:
        return None if self._attention is None else self._attention.rope

    @property
    def cascades(self) -> Cascades | None:
        return None if self._attention is None else self._attention.cascades

    @property
    def captured_cascades(self) -> CapturesCascades | None:
        return None if self._attention is None else self._attention.captured_cascades

    # Captured steps: attention's, and what layers with a state read in them. -----------------------------------------

    @property
    def decodes(self) -> CapturesDecodes | None:
        return self if self._attention is None or self._attention.decodes is not None else None

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1 if self._attention is None else needed(self._attention.decodes).get_cuda_graph_seq_len_fill_value()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if self._attention is not None:
            needed(self._attention.decodes).init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
    ) -> None:
        self._mixed_step = None
        if self._attention is not None:
            needed(self._attention.decodes).init_forward_metadata_capture_cuda_graph(
                bs, num_tokens, req_pool_indices, seq_lens, forward_mode
            )

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        seq_lens_cpu: torch.Tensor,
    ) -> None:
        if self._attention is not None:
            needed(self._attention.decodes).init_forward_metadata_replay_cuda_graph(
                bs, req_pool_indices, seq_lens, forward_mode, seq_lens_cpu
            )

    @property
    def page_table(self) -> torch.Tensor | None:
        return self._pages if self._attention is None else needed(self._attention.decodes).page_table

    @property
    def verifies(self) -> CapturesVerify | None:
        has_all = self._attention is None or self._attention.verifies is not None
        return self if self._mixed is not None and has_all else None

    def init_forward_metadata_capture_verify(self, num_rows: int, num_tokens: int, seq_lens: torch.Tensor) -> None:
        if self._attention is not None:
            needed(self._attention.verifies).init_forward_metadata_capture_verify(num_rows, num_tokens, seq_lens)

    def begin_captured_verify(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        self._mixed_step = self._held.begin_captured(rows, seq_lens)
        if self._attention is not None:
            needed(self._attention.verifies).begin_captured_verify(rows, seq_lens)

    @property
    def mixed(self) -> CapturesMixed | None:
        return self if self.mixed_obstacle is None else None

    @property
    def mixed_obstacle(self) -> str | None:
        if self._mixed is None:
            return "no kernel serves some layers with a state, which take a step's prompts from the host"
        return None if self._attention is None else self._attention.mixed_obstacle

    def runs_well_captured(self, batch: ForwardBatch) -> bool:
        of_attention = self._attention is None or needed(self._attention.mixed).runs_well_captured(batch)
        return of_attention and not batch.num_verify_tokens

    @property
    def prompts(self) -> CapturesPrompts | None:
        has_all = self._attention is None or self._attention.prompts is not None
        return self if self._mixed is not None and has_all else None

    def prompt_work_bytes(self, has_prefix: bool) -> int:
        of_attention = 0 if self._attention is None else needed(self._attention.prompts).prompt_work_bytes(has_prefix)
        return PromptStates.num_bytes + of_attention

    def init_forward_metadata_capture_prompts(self, num_tokens: int, work: torch.Tensor, has_prefix: bool) -> None:
        self._mixed_step = PromptStates.capture(work)
        if self._attention is not None:
            of_attention = work[PromptStates.num_bytes :]
            needed(self._attention.prompts).init_forward_metadata_capture_prompts(num_tokens, of_attention, has_prefix)

    def write_prompt_work(self, num_tokens: int, memory: np.ndarray, prompts: StepPrompts) -> bool:
        if not PromptStates.write(memory, prompts):
            return False
        of_attention = memory[PromptStates.num_bytes :]
        if self._attention is None:
            return True
        return needed(self._attention.prompts).write_prompt_work(num_tokens, of_attention, prompts)

    def init_forward_metadata_capture_mixed(self, num_tokens: int) -> None:
        self._mixed_step = self._mixed_states.capture(num_tokens)
        if self._attention is not None:
            needed(self._attention.mixed).init_forward_metadata_capture_mixed(num_tokens)

    def begin_captured_mixed(self, num_tokens: int, rows: torch.Tensor) -> None:
        if self._attention is not None:
            needed(self._attention.mixed).begin_captured_mixed(num_tokens, rows)

    def init_forward_metadata_replay_mixed(self, num_tokens: int, batch: ForwardBatch) -> None:
        self._mixed_step = self._mixed_states.fill(num_tokens, CommonAttentionMetadata.of(batch))
        if self._attention is not None:
            needed(self._attention.mixed).init_forward_metadata_replay_mixed(num_tokens, batch)

    @property
    def _mixed_states(self) -> MixedStateSteps:
        if self._mixed is None:
            raise RuntimeError("steps with prompts cannot be captured: ask for mixed first")
        return self._mixed

    @property
    def _of_attention(self) -> AttentionBackend:
        if self._attention is None:
            raise RuntimeError("the model has no attention layers, but one was called")
        return self._attention
