"""States of verify steps: those of decodes stay as they were until it is known which tokens are accepted.

A state cannot be taken back, and one for each token would take several times the memory. So a step with drafts leaves
none, and keeps the operands that its layers had. When the tokens are chosen each layer takes the states on by the
accepted ones alone. That is its arithmetic again, for few tokens; the linears around it have run.

Shape legend: T tokens of a step, R requests, Q requests that are sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata
from mllm_compile.runtime.forward_batch import ForwardBatch
from mllm_compile.runtime.state.base import StateBackend, StateInputs
from mllm_compile.runtime.state.metadata import Segment, StateMetadata
from mllm_compile.runtime.state.mixed import MixedStates, PromptRows


class HeldStates:
    """The verify step that runs, or whose tokens are being chosen.

    Args:
        states: computes layers.
        scratch_row: of the pool; kernels leave there what nobody reads.
        weights: of the model; they keep their places, and updates write them.
    """

    def __init__(self, states: StateBackend, scratch_row: int, weights: Iterable[torch.Tensor] = ()) -> None:
        self._states, self._scratch_row = states, scratch_row
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._inputs: list[StateInputs] = []
        self._requests: PromptRows | None = None  # whose states are held
        self._is_captured = False  # then these are all of the step's

    def begin(self, batch: ForwardBatch) -> MixedStates | None:
        """Plans a batch, ahead of the model; what kernels read of a verify step. None: what they read of any other."""
        self._inputs, self._requests, self._is_captured = [], None, False
        new, earlier = batch.extend_seq_lens, batch.extend_prefix_lens
        if not batch.num_verify_tokens or new is None or earlier is None:
            return None
        common = CommonAttentionMetadata.of(batch)
        first = common.num_decodes  # those ahead have one token each, which is accepted
        end = int(common.query_start_loc_cpu.numpy().searchsorted(batch.num_verify_tokens))
        if first >= end:
            return None
        ends = torch.cumsum(new, 0, dtype=torch.int32)
        rows, has_state = batch.req_pool_indices, earlier > 0
        targets = rows.clone()
        targets[first:end] = self._scratch_row
        # Of their own, as StateMetadata.of_prompts has them.
        parts = [part[first:].clone() for part in (targets, has_state, rows, ends - new, ends)]
        held = [part[first:end].clone() for part in (rows, has_state, rows, ends - new, ends - new)]
        self._requests = PromptRows(*held)
        return MixedStates((rows[:first], has_state[:first]) if first else None, PromptRows(*parts))

    def begin_captured(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> MixedStates:
        """Plans a step of R requests with C tokens each, padding among them, in its capture.

        Args:
            rows: [R, C] int64 and seq_lens: [R, C] int32 of its tokens, as each replay finds them.
        """
        sources, has_state = rows[:, 0].contiguous(), seq_lens[:, 0] > 1
        starts = torch.arange(0, rows.numel(), rows.shape[1], dtype=torch.int32, device=rows.device)
        targets = torch.full_like(sources, self._scratch_row)
        self._inputs, self._is_captured = [], True
        self._requests = PromptRows(sources, has_state, sources, starts, starts)
        # Padding is computed as well: its outputs must be finite.
        return MixedStates(None, PromptRows(targets, has_state, sources, starts, starts + rows.shape[1]))

    def hold(self, inputs: StateInputs) -> None:
        """Keeps a layer's operands, whose memory later layers use again; also constants that a piece has computed."""
        count, constants = inputs.metadata.num_held_tokens, inputs.layer.kind.constants
        operands = {
            name: self._constant(value) if name in constants else copy_of(value[:count])
            for name, value in inputs.operands.items()
        }
        self._inputs.append(replace(inputs, operands=operands))

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        return value if value.untyped_storage().data_ptr() in self._weights else copy_of(value)

    def keep(self, counts: torch.Tensor) -> None:
        """Takes the states on. Of a captured step it is captured too, right behind.

        Args:
            counts: [Q] int64, of the step's tokens of each request those that hold; decodes come first.
        """
        if not self._inputs:
            return
        metadata = self._accepted(self._inputs[0].metadata, counts)
        outs: dict[tuple[object, ...], torch.Tensor] = {}  # which nobody reads
        for inputs in self._inputs:
            out, like = inputs.out, (inputs.out.shape, inputs.out.dtype)
            if like not in outs:
                # Zeros: kernels of states read `ends` before the launch right ahead has ended, and that is this.
                outs[like] = out.new_zeros((inputs.metadata.num_held_tokens, *out.shape[1:]))
            self._states.forward(replace(inputs, out=outs[like], metadata=metadata))
        self._inputs = []

    def _accepted(self, metadata: StateMetadata, counts: torch.Tensor) -> StateMetadata:
        """The tokens that hold, as a step of their own."""
        held = [segment for segment in metadata.segments if segment.start < metadata.num_held_tokens]
        if not self._is_captured:
            counts = counts[metadata.num_decodes : metadata.num_decodes + len(held)]
        mixed = None
        if self._requests is not None:
            mixed = MixedStates(None, self._requests._replace(ends=self._requests.starts + counts.int()))
        # A GPU's kernels read the tensors alone.
        segments = _shortened(held, counts.tolist()) if held and counts.device.type == "cpu" else ()
        return replace(metadata, num_decodes=0, num_held_tokens=0, segments=segments, mixed=mixed)


def _shortened(segments: Sequence[Segment], lengths: Sequence[int]) -> list[Segment]:
    return [segment._replace(end=segment.start + length) for segment, length in zip(segments, lengths, strict=True)]


def copy_of(tokens: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which kernels are compiled for; of numbers that repeat there is one."""
    once = tokens[tuple(slice(None if stride else 1) for stride in tokens.stride())]
    copy = torch.empty_strided(once.shape, once.stride(), dtype=once.dtype, device=once.device).copy_(once)
    return copy.expand(tokens.shape)
