"""The backend of models with more than attention: each layer goes to who computes its kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionBackend, AttentionInputs, Unrotated
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata, StepPrompts
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.state.base import StateBackend, StateInputs
from mllm_compile.runtime.state.mixed import MixedStates, MixedStateSteps, PromptStates


class HybridAttnBackend(AttentionBackend):
    """Attention layers go to an attention backend, layers with a state to theirs.

    Args:
        attention: plans and computes attention; None for a model without any.
        state: computes layers with a state. It plans nothing: StateMetadata is all that it reads of a batch.
        mixed: what it reads in captured steps with prompts; None: there are layers without kernels, and none can be
            captured.
        pages: [max requests, W] int32, of a model without attention: captured decodes that prepare their own inputs
            list pages, though none reads them.
    """

    def __init__(
        self,
        attention: AttentionBackend | None,
        state: StateBackend,
        mixed: MixedStateSteps | None = None,
        pages: torch.Tensor | None = None,
    ) -> None:
        self._attention = attention
        self._state = state
        self._mixed = mixed
        self._pages = pages
        self._mixed_step: MixedStates | None = None  # what layers read of the batch

    def forward_state(self, inputs: StateInputs) -> None:
        """Computes a layer with a state."""
        if self._mixed_step is not None:
            inputs = replace(inputs, metadata=replace(inputs.metadata, mixed=self._mixed_step))
        self._state.forward(inputs)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._mixed_step = None
        if self._attention is not None:
            self._attention.init_forward_metadata(batch)

    def forward_extend(self, inputs: AttentionInputs) -> None:
        self._of_attention.forward_extend(inputs)

    def forward_decode(self, inputs: AttentionInputs) -> None:
        self._of_attention.forward_decode(inputs)

    def forward(self, inputs: AttentionInputs) -> None:
        self._of_attention.forward(inputs)

    def cascade_pays(self, num_requests: int, num_tokens: int, is_captured: bool = False) -> bool:
        return self._attention is not None and self._attention.cascade_pays(num_requests, num_tokens, is_captured)

    def rotates(self, layer: AttentionLayer) -> bool:
        return self._of_attention.rotates(layer)

    def forward_unrotated(
        self, unrotated: Unrotated, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        self._of_attention.forward_unrotated(unrotated, layer, batch, out)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1 if self._attention is None else self._attention.get_cuda_graph_seq_len_fill_value()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if self._attention is not None:
            self._attention.init_cuda_graph_state(max_bs, max_num_tokens)

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
            self._attention.init_forward_metadata_capture_cuda_graph(
                bs, num_tokens, req_pool_indices, seq_lens, forward_mode
            )

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        forward_mode: ForwardMode,
        seq_lens_cpu: torch.Tensor,
    ) -> None:
        if self._attention is not None:
            self._attention.init_forward_metadata_replay_cuda_graph(
                bs, req_pool_indices, seq_lens, seq_lens_sum, forward_mode, seq_lens_cpu
            )

    @property
    def page_table(self) -> torch.Tensor | None:
        return self._pages if self._attention is None else self._attention.page_table

    @property
    def mixed_obstacle(self) -> str | None:
        if self._mixed is None:
            return "no kernel serves some layers with a state, which take a step's prompts from the host"
        return None if self._attention is None else self._attention.mixed_obstacle

    def runs_well_captured(self, batch: ForwardBatch) -> bool:
        return self._attention is None or self._attention.runs_well_captured(batch)

    def prompt_work_bytes(self, extends: bool) -> int:
        if self._mixed is None:
            return 0
        of_attention = 0 if self._attention is None else self._attention.prompt_work_bytes(extends)
        is_captured = self._attention is None or of_attention
        return PromptStates.num_bytes + of_attention if is_captured else 0

    def init_forward_metadata_capture_prompts(self, num_tokens: int, work: torch.Tensor, extends: bool) -> None:
        self._mixed_step = PromptStates.capture(work)
        if self._attention is not None:
            of_attention = work[PromptStates.num_bytes :]
            self._attention.init_forward_metadata_capture_prompts(num_tokens, of_attention, extends)

    def write_prompt_work(self, num_tokens: int, memory: np.ndarray, prompts: StepPrompts) -> bool:
        if not PromptStates.write(memory, prompts):
            return False
        of_attention = memory[PromptStates.num_bytes :]
        return self._attention is None or self._attention.write_prompt_work(num_tokens, of_attention, prompts)

    def init_forward_metadata_capture_mixed(self, num_tokens: int) -> None:
        self._mixed_step = self._mixed_states.capture(num_tokens)
        if self._attention is not None:
            self._attention.init_forward_metadata_capture_mixed(num_tokens)

    def begin_captured_mixed(self, num_tokens: int, rows: torch.Tensor) -> None:
        if self._attention is not None:
            self._attention.begin_captured_mixed(num_tokens, rows)

    def init_forward_metadata_replay_mixed(self, num_tokens: int, batch: ForwardBatch) -> None:
        self._mixed_step = self._mixed_states.fill(num_tokens, CommonAttentionMetadata.of(batch))
        if self._attention is not None:
            self._attention.init_forward_metadata_replay_mixed(num_tokens, batch)

    @property
    def _mixed_states(self) -> MixedStateSteps:
        if self._mixed is None:
            raise RuntimeError("steps with prompts cannot be captured: ask mixed_obstacle first")
        return self._mixed

    @property
    def _of_attention(self) -> AttentionBackend:
        if self._attention is None:
            raise RuntimeError("the model has no attention layers, but one was called")
        return self._attention
