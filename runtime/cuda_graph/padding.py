"""Padded steps: the fixed places of their inputs, batches of padding over them, and the outputs of their layers.

Rows of padding belong to the dummy row: at most they write to page 0 and read one key of it.

Shape legend: T tokens, R requests; M the most tokens of any graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mllm_compile.runtime.attention.capture import needed
from mllm_compile.runtime.collectives.base import current
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.step_inputs import StepInputs, TokenPlaces
from mllm_compile.runtime.forward_batch import ForwardBatch, TokenInputs
from mllm_compile.runtime.forward_context import get_forward_context
from mllm_compile.runtime.graph_mode import DPMetadata, GraphKind

# The inputs of a step come in one upload, always of all its places. A longer step has the time to copy its tokens to
# places of their own.
_MOST_UPLOADED_TOKENS = 512


class PaddedBatch(NamedTuple):
    """A step at its graph's size.

    Attributes:
        batch: attention's input: padding alone where the graph holds attention, else the step itself.
        tokens: the pieces' input.
        all_rows: [T], 0 to T - 1.
    """

    batch: ForwardBatch
    tokens: TokenInputs
    all_rows: torch.Tensor


class PaddedInputs:
    """The inputs of all captured steps.

    Attributes:
        inputs: the places of most steps; a step that puts its inputs there spares copying them.
        num_ranks: ranks with requests of their own, whose inputs a captured decode or verify step has all; 1 without
            them.
    """

    def __init__(self, runner: CapturableModel, dispatcher: GraphDispatcher) -> None:
        most_tokens, most_requests = dispatcher.most_tokens, max(dispatcher.decode_requests, default=0)
        backend, self._runner = runner.attn_backend, runner
        # Only decode graphs ask attention for it; pieces are captured between any attention.
        padding_len = needed(backend.decodes).get_cuda_graph_seq_len_fill_value() if most_requests else 1
        self.num_ranks = runner.dp_size
        most_of_all = self.num_ranks * max((most_requests, *dispatcher.sizes[GraphKind.VERIFY]))
        num_uploaded = max(most_of_all, min(most_tokens, _MOST_UPLOADED_TOKENS))
        most_rows, work_bytes = max(runner.config.max_attended, most_of_all), 0
        for kind in (GraphKind.PREFILL_NEW, GraphKind.PREFILL_CACHED):
            if dispatcher.sizes[kind]:
                is_cached = kind is GraphKind.PREFILL_CACHED
                work_bytes = max(work_bytes, needed(backend.prompts).prompt_work_bytes(is_cached))
        takes_adapters = runner.model.lora is not None
        self.inputs = StepInputs(num_uploaded, most_rows, padding_len, runner.device, work_bytes, takes_adapters)
        self._long_inputs = TokenPlaces.zeros(most_tokens, runner.device, takes_adapters)
        if runner.model.reads_hidden_states:
            for places in (self.inputs, self._long_inputs):
                places.take_hidden_states(runner.model.hidden_size, runner.config.dtype)
        self._all_rows = torch.arange(most_tokens, device=runner.device)
        self._all_slots: torch.Tensor | None = None
        if self.num_ranks > 1:
            self._all_slots = torch.ones(self.num_ranks * most_tokens, dtype=torch.int64, device=runner.device)

    def take_tokens(self, batch: ForwardBatch, size: int) -> None:
        """Puts a step's tokens in their places, and padding behind them."""
        self._places(size).take_tokens(batch, size)

    def take_adapters(self, size: int) -> None:
        """Puts the slots of the rows' adapters in their places, for tokens that are a row each; within a capture."""
        rows = self.inputs.req_pool_indices[:size]
        torch.index_select(needed(self._runner.row_state.adapters).slots, 0, rows, out=self.adapter_slots(size))

    def adapter_slots(self, size: int) -> torch.Tensor:
        """[size] int32, the places of the slots of tokens' adapters, of a model that takes some."""
        return needed(self._places(size).adapter_slots)[:size]

    def mark_tokens(self, across: DPMetadata, size: int) -> None:
        """Notes which tokens of all ranks are real, in a step of `size` tokens a rank."""
        if self._all_slots is not None:
            across.mark_tokens(self._all_slots[: self.num_ranks * size])

    def all_rows(self, size: int) -> torch.Tensor:
        """The rows of a step of `size` tokens."""
        return self._all_rows[:size]

    def rows_of(self, batch: ForwardBatch) -> torch.Tensor:
        """The rows whose logits a batch asks for."""
        return self._all_rows[: batch.batch_size] if batch.logits_indices is None else batch.logits_indices

    def tokens(self, size: int, has_lora: bool = False) -> TokenInputs:
        """The pieces' input in a step of `size` tokens."""
        inputs = self._places(size)
        given = inputs.input_ids[:size], inputs.positions[:size], inputs.out_cache_loc[:size]
        all_slots = None if self._all_slots is None else self._all_slots[: self.num_ranks * size]
        hidden_states = None if inputs.hidden_states is None else inputs.hidden_states[:size]
        media, axes, rope_lens = inputs.media, inputs.mrope_positions, inputs.rope_lens[:size]
        adapter_slots = self.adapter_slots(size) if has_lora else None
        return TokenInputs(*given, media, axes, rope_lens, all_slots, hidden_states, adapter_slots)

    def decode_slots(self, size: int) -> torch.Tensor | None:
        """The slots of a captured step of `size` tokens a rank, each in a row of its own, in the order in which ranks'
        tokens are gathered. A rank's inputs begin with its own."""
        if self.num_ranks == 1:
            return None
        return torch.roll(self.inputs.out_cache_loc[: self.num_ranks * size], current().rank * size)

    def decodes(self, size: int, has_lora: bool = False) -> ForwardBatch:
        """Decodes of `size` rows of padding."""
        inputs = self.inputs
        batch = self._runner.prepare_forward_batch_decode(
            inputs.input_ids[:size],
            inputs.req_pool_indices[:size],
            inputs.seq_lens[:size],
            inputs.out_cache_loc[:size],
            seq_lens_cpu=torch.full((size,), inputs.padding_len, dtype=torch.int32),
            positions=inputs.positions[:size],
        )
        batch.media, batch.mrope_positions = inputs.media, inputs.mrope_positions
        batch.adapter_slots = self.adapter_slots(size) if has_lora else None
        return batch

    def prompts(self, size: int, has_lora: bool = False) -> ForwardBatch:
        """Prompts of `size` tokens of padding."""
        runner, tokens = self._runner, self.tokens(size, has_lora)
        lengths = torch.tensor(prompt_lengths(size, runner.config.runtime.max_model_len), dtype=torch.int32)
        new, none = lengths.to(runner.device), torch.zeros_like(lengths)
        batch = runner.prepare_forward_batch_extend(
            tokens.input_ids,
            torch.zeros(len(lengths), dtype=torch.int64, device=runner.device),
            new,
            new,
            none.to(runner.device),
            tokens.out_cache_loc,
            extend_seq_lens_cpu=lengths,
            extend_prefix_lens_cpu=none,
            positions=tokens.positions,
        )
        batch.media, batch.mrope_positions = tokens.media, tokens.mrope_positions
        batch.adapter_slots = tokens.adapter_slots
        return batch

    def _places(self, size: int) -> TokenPlaces:
        return self.inputs if size <= self.inputs.max_tokens else self._long_inputs


class LayerOutputs:
    """The outputs of layers between pieces."""

    def __init__(self, most_tokens: int, num_ranks: int) -> None:
        self._most_tokens, self._num_ranks = most_tokens, num_ranks
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, index: int, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Fresh memory for eager steps and captured decodes, in a capture of the graph's pool. Other graphs get buffers
        that begin as zeros: no layer writes rows of padding, and what is there goes on into keys and values, so it must
        be finite."""
        descriptor = get_forward_context().batch_descriptor
        if descriptor is None or descriptor.uniform:
            make = like.new_empty if self._num_ranks == 1 else like.new_zeros
            return make((like.shape[0], *shape), dtype=dtype)
        key = (index, *shape, dtype)
        if key not in self._buffers:
            self._buffers[key] = like.new_zeros((self._most_tokens, *shape), dtype=dtype)
        return self._buffers[key][: like.shape[0]]


def prompt_lengths(num_tokens: int, longest: int) -> list[int]:
    """Lengths of as few requests as can have so many tokens."""
    return [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
