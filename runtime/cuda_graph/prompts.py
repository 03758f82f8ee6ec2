"""PREFILL_NEW and PREFILL_CACHED: one graph for prompts alone, up to their head, whose inputs it fetches itself
(prompt_slots.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from mllm_compile.runtime.attention.capture import needed
from mllm_compile.runtime.attention.metadata import StepPrompts
from mllm_compile.runtime.cuda_graph.kind import BodyGraph, GraphSetting, KindGraphs, capture_body
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.prompt_slots import PromptSlots
from mllm_compile.runtime.forward_batch import LogitsProcessorOutput
from mllm_compile.runtime.graph_mode import BatchDescriptor, GraphKind
from mllm_compile.runtime.step_fields import StepFields

# Tokens of captured prompts, whose inputs come in one upload, always of all its places. A longer step behind a cached
# prefix takes so long that a graph spares little of it.
_SIZES = {
    GraphKind.PREFILL_NEW: (64, 128, 192, 256, 384, 512),
    GraphKind.PREFILL_CACHED: (16, 64, 128, 192, 256),
}


@dataclass(frozen=True, slots=True)
class LaunchedPrompts:
    """Captured prompts, launched up to their head.

    Attributes:
        fields: the step's on the device, until the next launch of such prompts or the next upload.
        head: gives the logits of tokens [S] int64.
    """

    fields: StepFields[torch.Tensor]
    head: Callable[[torch.Tensor], LogitsProcessorOutput]


class PromptGraphs(KindGraphs):
    """See the module's header."""

    def __init__(self, setting: GraphSetting) -> None:
        super().__init__(setting)
        self._attention = needed(setting.runner.attn_backend.prompts)
        self._dispatcher = setting.dispatcher
        self._slots = PromptSlots(self._padded.inputs)
        self._graphs: dict[GraphKind, dict[int, BodyGraph]] = {kind: {} for kind in _SIZES}

    @staticmethod
    def sizes(runner: CapturableModel, kind: GraphKind) -> Sequence[int]:
        if not runner.config.cudagraph.whole_prompts:
            return ()
        if runner.communicator is not None or runner.model.has_experts:
            return ()  # over ranks, and of mixtures of experts, they have not been seen
        if runner.model.rope is not None or runner.model.reads_hidden_states or runner.attn_backend.prompts is None:
            return ()  # RoPE's lengths and hidden states would be further inputs
        return [size for size in _SIZES[kind] if size <= runner.config.runtime.max_num_batched_tokens]

    def capture(self, descriptor: BatchDescriptor) -> None:
        size, kind, work = descriptor.num_tokens, descriptor.kind, self._padded.inputs.work
        is_cached = kind is GraphKind.PREFILL_CACHED
        self._attention.init_forward_metadata_capture_prompts(size, work, is_cached)
        is_first = not any(self._graphs.values())
        self._graphs[kind][size] = capture_body(self._setting, descriptor, self._slots.begin, is_first)

    def end_captures(self) -> None:
        self._slots.captured()

    def find(self, num_tokens: int, prefix_lens: np.ndarray) -> BatchDescriptor | None:
        """The graph for prompts of so many tokens together; None: none holds them.

        Args:
            prefix_lens: [R] tokens of each that the cache has.
        """
        kind = GraphKind.PREFILL_CACHED if prefix_lens.any() else GraphKind.PREFILL_NEW
        return self._dispatcher.find(kind, num_tokens)

    def launch(
        self, descriptor: BatchDescriptor, fields: StepFields[np.ndarray], prompts: StepPrompts
    ) -> LaunchedPrompts | None:
        """Runs prompts up to their head, in one launch.

        Args:
            descriptor: as `find` gives it.
            fields: of the step, logits_indices among them.

        Returns:
            None: the graph's kernels do not serve these prompts well.
        """
        size, slots, attention = descriptor.num_tokens, self._slots, self._attention
        placed = slots.write(fields, lambda work: attention.write_prompt_work(size, work, prompts))
        if placed is None:
            return None
        self._padded.inputs.clear_rope_lens()
        self._runner.forward_pass_id += 1
        entry, times = self._graphs[descriptor.kind][size], self._runner.forward_times
        with nullcontext() if times is None else times.measure(size):
            entry.graph.replay()
            slots.replayed()  # before anything can fail: the device has taken the slot
        return LaunchedPrompts(placed, partial(self._runner.program.head, entry.padded.batch, entry.body))
