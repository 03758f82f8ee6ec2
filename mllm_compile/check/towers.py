"""Runs a program on images and sounds, as check/program.py runs it on texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from mllm_compile.check.adapters import AdapterCase
from mllm_compile.check.bounds import ROUNDED_TWICE, hint, limit_of
from mllm_compile.check.media import (
    AddedToPrompts,
    MediaCase,
    compare_media,
    features_of,
    inputs_with_features,
    special_ids,
)
from mllm_compile.check.packed_requests import Bound, run_packed
from mllm_compile.check.states import StateCheck
from mllm_compile.check.weights import program_weights
from mllm_compile.check.with_adapters import bound_for_adapters
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.link import LinkedProgram, current_device

if TYPE_CHECKING:
    from mllm_compile.compiler.lowered import Lowered
    from mllm_compile.model.towers.adapter import TowerAdapter


def check_media(
    lowered: Lowered, linked: LinkedProgram, by_name: Mapping[str, torch.Tensor], device: str, states: StateCheck
) -> str | None:
    """Runs a batch with images, where the model takes some, one with sounds, and again with adapters, where it takes
    those; returns why they would not be served right."""
    faults = (
        _TowerCheck(lowered, adapter, tower, linked, by_name, device, states).fault()
        for adapter, tower in zip(lowered.adapters, lowered.of_media[1:], strict=True)
    )
    return next((fault for fault in faults if fault is not None), None)


class _TowerCheck:
    """One of the model's towers, with its text, on images or sounds of a case."""

    def __init__(
        self,
        lowered: Lowered,
        adapter: TowerAdapter,
        tower: Lowered,
        linked: LinkedProgram,
        by_name: Mapping[str, torch.Tensor],
        device: str,
        states: StateCheck,
    ) -> None:
        programs = lowered.program.media
        assert programs is not None, "a model with towers has programs of them"
        hf_model = lowered.hf_model
        self._lowered, self._adapter, self._tower = lowered, adapter, tower
        self._linked, self._by_name, self._device, self._states = linked, by_name, device, states
        self._feature_width = programs.facts.feature_width
        vocab_size = hf_model.sizes(programs.with_features.layers).vocab_size
        self._case = MediaCase(adapter, vocab_size, special_ids(hf_model), device, programs.facts.axes)
        self._dtype, self._lengths = hf_model.model.dtype, tuple(len(ids) for ids, _ in self._case.prompts)

    def fault(self) -> str | None:
        """The reason why it would not be served right, without adapters or with them."""
        text = self._lowered.of_media[0]
        fault = self._fault_of(text, partial(self._plain, text), lambda model, prompt: nullcontext())
        lora = self._lowered.program.lora
        if fault is not None or lora is None:
            return fault
        adapters, of_lora = AdapterCase(lora.layout, self._dtype, self._device), self._lowered.of_lora[1]
        slots = adapters.steps[0]
        return self._fault_of(
            of_lora,
            lambda rank: bound_for_adapters(self._linked, of_lora, self._by_name, adapters, self._device, rank),
            lambda model, prompt: adapters.added(model, slots[prompt]),
            *slots,
        )

    def _fault_of(self, one: Lowered, bound: Callable[[int], Bound], added: AddedToPrompts, *slots: int) -> str | None:
        ours: torch.Tensor | Exception
        try:
            ours = self._run(bound, slots)
        except Exception as failure:
            ours = failure
        limit = limit_of(one, sum(self._lengths)) * (1 if self._dtype == torch.float32 else ROUNDED_TWICE)
        return compare_media(self._lowered.hf_model, self._adapter, self._case, ours, limit, hint(one), added)

    def _run(self, bound: Callable[[int], Bound], slots: Sequence[int]) -> torch.Tensor:
        features = features_of(self._executor(self._tower, 0), self._case, self._dtype, self._device)
        features = torch.nn.functional.pad(features, (0, self._feature_width - features.shape[1]))
        inputs = dict(inputs_with_features(self._case, features))
        if slots:
            of_tokens = np.repeat(slots, self._lengths).astype(np.int32)
            inputs["adapter_slots"] = torch.from_numpy(of_tokens).to(self._device)
        facts = self._adapter.facts
        blocks = self._case.blocks if facts.sees_ahead else ()

        def of_rank(rank: int) -> torch.Tensor:
            with current_device(torch.device(self._device)):
                executor, layers = bound(rank)
                return run_packed(
                    executor,
                    layers,
                    self._lengths,
                    1,
                    inputs,
                    None,
                    self._device,
                    self._dtype,
                    self._states,
                    blocks,
                    facts.sees_ahead_in_windows,
                )[0]

        num_ranks = self._lowered.num_ranks
        return of_rank(0) if num_ranks == 1 else run_lockstep(num_ranks, of_rank)[0]

    def _plain(self, text: Lowered, rank: int) -> Bound:
        own = self._executor(text, rank)
        return own, tuple(AttentionLayer.of(layer, own.weights, rank) for layer in own.program.layers)

    def _executor(self, one: Lowered, rank: int) -> ProgramExecutor:
        return ProgramExecutor(one.program, self._linked.pieces, program_weights(self._by_name, one.program, one, rank))
