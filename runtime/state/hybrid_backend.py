"""The backend of models with more than attention: each layer goes to who computes its kind."""

from __future__ import annotations

import torch

from mllm_compile.runtime.attention.base import AttentionBackend, AttentionInputs, Unrotated
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.state.base import StateBackend, StateInputs


class HybridAttnBackend(AttentionBackend):
    """Attention layers go to an attention backend, layers with a state to theirs.

    Args:
        attention: plans and computes attention; None for a model without any.
        state: computes layers with a state. It plans nothing: StateMetadata is all that it reads of a batch.
    """

    def __init__(self, attention: AttentionBackend | None, state: StateBackend) -> None:
        self._attention = attention
        self._state = state

    def forward_state(self, inputs: StateInputs) -> None:
        """Computes a layer with a state."""
        self._state.forward(inputs)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
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
        return None if self._attention is None else self._attention.page_table

    @property
    def mixed_obstacle(self) -> str | None:
        return "layers with a state take a step's prompts from the host"

    @property
    def _of_attention(self) -> AttentionBackend:
        if self._attention is None:
            raise RuntimeError("the model has no attention layers, but one was called")
        return self._attention
