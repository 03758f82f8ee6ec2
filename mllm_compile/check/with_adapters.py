"""Runs a program for adapters, as check/program.py runs the one without."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mllm_compile.check.adapters import AdapterCase
from mllm_compile.check.bounds import ROUNDED_TWICE, counted, crowd, hint, limit_of
from mllm_compile.check.kernels import relative_errors
from mllm_compile.check.packed_requests import Bound, batches_of, model_requests, num_different, run_ranks
from mllm_compile.check.states import StateCheck
from mllm_compile.check.transformers_forward import run_transformers
from mllm_compile.check.weights import program_weights
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.lora.pool import LoraPool
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.link import LinkedProgram

if TYPE_CHECKING:
    from mllm_compile.compiler.lowered import Lowered


def bound_for_adapters(
    linked: LinkedProgram, one: Lowered, by_name: Mapping[str, torch.Tensor], case: AdapterCase, device: str, rank: int
) -> Bound:
    """A program for adapters over the weights, with those of the case in its memory."""
    layout, program = case.layout, one.program
    pool = LoraPool(layout, torch.device(device), rank)
    case.write(pool)
    own = replace(program, weights=tuple(name for name in program.weights if name not in layout.shapes()))
    executor = ProgramExecutor(program, linked.pieces, {**program_weights(by_name, own, one, rank), **pool.buffers})
    return executor, tuple(AttentionLayer.of(layer, executor.weights, rank) for layer in program.layers)


def check_adapters(
    lowered: Lowered, linked: LinkedProgram, by_name: Mapping[str, torch.Tensor], device: str, states: StateCheck
) -> None:
    """Runs every batch with adapters, where the program takes some, against Transformers' linears with the same."""
    lora, hf_model = lowered.program.lora, lowered.hf_model
    if lora is None:
        return
    of_lora, program, dtype = lowered.of_lora[0], lora.program, hf_model.model.dtype
    case = AdapterCase(lora.layout, dtype, device)

    @functools.cache
    def theirs_of(index: int, is_alone: bool, slot: int) -> torch.Tensor:
        ids, positions = batches[0 if is_alone else -1]
        with case.added(hf_model.model, slot):
            return run_transformers(hf_model, ids[index : index + 1], positions[index : index + 1])

    ranks = [bound_for_adapters(linked, of_lora, by_name, case, device, rank) for rank in range(lowered.num_ranks)]
    batches = batches_of(program, *model_requests(hf_model, program, device))
    for batch_ids, batch_positions in batches:
        count = num_different(batch_ids)
        for slots in case.steps:
            of_each = [theirs_of(index, count == 1, slot) for index, slot in enumerate(slots[:count])]
            theirs = torch.cat(of_each).repeat(len(batch_ids) // count, 1)
            given = batch_ids, batch_positions, None, device, dtype, states, slots[:count]
            error = counted(relative_errors(run_ranks(ranks, *given)[0], theirs), bool(program.expert_weights))
            limit = limit_of(of_lora, sum(map(len, batch_ids))) * (1 if dtype == torch.float32 else ROUNDED_TWICE)
            if not error <= limit:
                raise UnsupportedModelError(
                    f"adapters of {hf_model.model.config.model_type!r} would not be served right: with "
                    f"{crowd(len(batch_ids))} logits are off by {error:.2g} from Transformers' with what they add "
                    f"(limit {limit:g}). Leave out the section lora, or set lora.targets to other modules."
                    f"{hint(of_lora)}"
                )
