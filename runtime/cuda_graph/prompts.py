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
        # By kind, and whether some request has an adapter.
        self._graphs: dict[tuple[GraphKind, bool], dict[int, BodyGraph]] = {
            (kind, has_lora): {} for kind in _SIZES for has_lora in (False, True)
        }

    @staticmethod
    def sizes(runner: CapturableModel, kind: GraphKind) -> Sequence[int]:
        if not runner.config.cudagraph.whole_prompts:
            return ()
        if runner.communicator is not None or runner.model.has_experts:
            return ()  # over ranks, and of mixtures of experts, they have not been seen
        if runner.model.rope is not None or runner.model.reads_hidden_states or runner.attn_backend.prompts is None:
            return ()  # RoPE's lengths and hidden states would be further inputs
        if runner.model.sources is not None:
            return ()  # so would be the sources of tokens
        return [size for size in _SIZES[kind] if size <= runner.config.runtime.max_num_batched_tokens]

    def capture(self, descriptor: BatchDescriptor) -> None:
        size, kind, has_lora = descriptor.num_tokens, descriptor.kind, descriptor.has_lora
        is_cached = kind is GraphKind.PREFILL_CACHED
        self._attention.init_forward_metadata_capture_prompts(size, self._padded.inputs.work, is_cached)
        is_first = not any(of_kind for (_, is_such), of_kind in self._graphs.items() if is_such == has_lora)
        captured = capture_body(self._setting, descriptor, self._slots.begin, is_first)
        self._graphs[kind, has_lora][size] = captured

    def end_captures(self) -> None:
        self._slots.captured()

    def find(self, num_tokens: int, prefix_lens: np.ndarray, has_lora: bool) -> BatchDescriptor | None:
        """The graph for prompts of so many tokens together; None: none holds them.

        Args:
            prefix_lens: [R] tokens of each that the cache has.
            has_lora: they run the program for adapters.
        """
        kind = GraphKind.PREFILL_CACHED if prefix_lens.any() else GraphKind.PREFILL_NEW
        return self._dispatcher.find(kind, num_tokens, has_lora)

    def launch(
        self, descriptor: BatchDescriptor, fields: StepFields[np.ndarray], prompts: StepPrompts
    ) -> LaunchedPrompts | None:
        """Runs prompts up to their head, in one launch.

        Args:
            descriptor: as `find` gives it.
            fields: of the step, logits_indices among them, and adapter_slots of the program for adapters.

        Returns:
            None: the graph's kernels do not serve these prompts well.
        """
        size, slots, attention = descriptor.num_tokens, self._slots, self._attention
        placed = slots.write(fields, lambda work: attention.write_prompt_work(size, work, prompts))
        if placed is None:
            return None
        self._padded.inputs.clear_rope_lens()
        self._runner.forward_pass_id += 1
        entry, times = self._graphs[descriptor.kind, descriptor.has_lora][size], self._runner.forward_times
        with nullcontext() if times is None else times.measure(size):
            entry.graph.replay()
            slots.replayed()  # before anything can fail: the device has taken the slot
        return LaunchedPrompts(placed, partial(self._runner.program.head, entry.padded.batch, entry.body))
