"""Runs the compiled program on small inputs before it is published: against Transformers' own forward.

Two requests are packed into one flat batch, at far-apart positions. Where pieces have variants for few tokens, one
token alone is run too. The two requests are repeated until every kernel of the linears and the variants for any number
have run. The reference is each request alone. It differs if the model carries an unknown state, reads neighbours by
place instead of by attention, or was broken by a pass or Inductor. The weights are random_weights.py's, so an 8B model
needs one layer's memory. check/kernels.py checks what such batches do not reach.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mllm_compile.check.adapters import AdapterCase
from mllm_compile.check.compiled import linked_of_folder
from mllm_compile.check.kernels import check_written_pieces, relative_errors
from mllm_compile.check.media import (
    AddedToPrompts,
    MediaCase,
    compare_media,
    features_of,
    inputs_with_features,
    special_ids,
)
from mllm_compile.check.packed_requests import (
    REQUEST_LENGTHS,
    SECOND_REQUEST_POSITION,
    Bound,
    Requests,
    batches_of,
    num_different,
    run_packed,
    run_ranks,
    small_requests,
    some_rows,
)
from mllm_compile.check.states import StateCheck
from mllm_compile.check.transformers_forward import logits_of_transformers, run_transformers, spread_of_transformers
from mllm_compile.check.weights import program_weights, quantise_weights
from mllm_compile.errors import CompileError, UnsupportedModelError
from mllm_compile.model.random_weights import materialise
from mllm_compile.model.refusals import first_line, refusing
from mllm_compile.passes.base import VARIANTS
from mllm_compile.passes.match.nodes import called_pieces, is_op
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from mllm_compile.runtime.lora.pool import LoraPool
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.link import LinkedProgram, current_device
from mllm_compile.runtime.program.spec import Program

if TYPE_CHECKING:
    from mllm_compile.compiler.lowered import Lowered
    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.model.towers.adapter import TowerAdapter

# ‖ours − theirs‖ / ‖theirs‖ of the worst token. Measured with these weights (4 to 36 layers, dense and experts, as
# traced and through Inductor): right models are off by up to 7e-7 in float32 and 0.017 in bfloat16. Wrong models are
# off by more: learned positions that were not ours by 0.16, convolutions by 0.35 and more, a state carried over by over
# 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}
# In 16 bits, or of inputs in eight, rounding sends a token with nearly equal scores to another expert, in a right model
# too. One of three experts in two layers made logits differ by 0.19. So there the token in the middle counts, and of
# each no more than this.
MOST_REROUTED = 0.5
# In 16 bits features carry the tower's rounding into the text: gemma3's logits were off by 0.084 on an H100.
ROUNDED_TWICE = 2
# Where linears read fp8 (quantise_activations): right models of 4 to 36 layers are off by 0.05 to 0.10. All else is
# held to the bound above, by the batches of few tokens, whose variants read bfloat16.
FP8_TOLERANCE = 0.2
# Where a CPU's linears round what they read to eight bits (pack_linears), each is off by 0.005 to 0.014. In bfloat16,
# whose bound this is, one is off by 0.003.
INT8_TOLERANCE = 8e-2


def self_check(
    lowered: Lowered,
    folder: Path,
    piece_suffix: str,
    device: str,
    page_size: int,
    state_dtype: str = "float32",
    kv_cache_dtype: str | None = None,
) -> str | None:
    """The reason why images would not be served right, where the model takes some; None: they would.

    Args:
        lowered: the lowered model; small real parameters replace its fake ones here.
        folder: the runtime's, with its pieces and its CUDA kernels.
        piece_suffix: which of a piece's files to run.
        device: where to run.
        page_size: tokens of a KV page.
        state_dtype: the type of sums of layers with a state.
        kv_cache_dtype: the type of keys and values; None: the model's.

    Raises:
        UnsupportedModelError: the program's logits are not Transformers'.
        CompileError: the program does not run, or a piece beside the model's computes something wrong.
    """
    hf_model, program = lowered.hf_model, lowered.program
    with current_device(torch.device(device)):
        by_name = quantise_weights(hf_model.model, materialise(hf_model, device), lowered.quantised)
        linked = linked_of_folder(program, folder, piece_suffix, torch.device(device))
        ranks = [
            linked.bind(program_weights(by_name, program, lowered, rank), rank) for rank in range(lowered.num_ranks)
        ]
        states = StateCheck(of_kind(linked.layer_kernels, "state"), state_dtype)
        cache_dtype = None if kv_cache_dtype is None else getattr(torch, kv_cache_dtype)
        logits = _check_program(lowered, ranks, device, states)
        check_written_pieces(linked, page_size, hf_model.model.dtype, logits, cache_dtype)
        _check_adapters(lowered, linked, by_name, device, states)
        return _check_media(lowered, linked, by_name, device, states)


def _check_program(lowered: Lowered, ranks: Sequence[Bound], device: str, states: StateCheck) -> torch.Tensor:
    """Runs every batch, on all ranks at once; returns the program's logits of the largest."""
    hf_model, program = lowered.hf_model, lowered.program
    model_type = hf_model.model.config.model_type
    batches = batches_of(program, *_requests_of(hf_model, program, device))
    known: dict[int, torch.Tensor] = {}
    spreads: dict[int, torch.Tensor] = {}
    for batch_ids, batch_positions in batches:
        wants_rows = len(batch_ids) in (len(REQUEST_LENGTHS), len(batches[-1][0]))  # the rest would take a second more
        with refusing(f"{model_type!r} does not run"):
            theirs = logits_of_transformers(hf_model, batch_ids, batch_positions, known)
        rows = some_rows(len(theirs), device) if wants_rows else None
        try:
            ours, *of_rows = run_ranks(ranks, batch_ids, batch_positions, rows, device, hf_model.model.dtype, states)
        except CompileError:
            raise
        except Exception as failure:
            raise CompileError(
                f"what was compiled of {model_type!r} does not run: {first_line(failure)}.{hint(lowered)}"
            ) from failure
        limit = _limit(lowered, sum(map(len, batch_ids)))
        errors = relative_errors(torch.cat([ours, *of_rows]), torch.cat([theirs, *(theirs[rows] for _ in of_rows)]))
        may_be_rerouted = bool(program.expert_weights) and limit > TOLERANCE[torch.float32]
        error = _counted(errors, may_be_rerouted)
        is_right, is_elsewhere = error <= limit, may_be_rerouted and error > MOST_REROUTED
        if not is_right and not is_elsewhere and hf_model.model.dtype != torch.float32:
            # A row may be off by as much more as rounding alone moves it.
            spread = spread_of_transformers(hf_model, batch_ids, batch_positions, known, spreads)
            spread = torch.cat([spread, *(spread[rows] for _ in of_rows)])
            is_right = _counted((errors - spread).clamp(min=0), may_be_rerouted) <= limit
        if not is_right:
            raise UnsupportedModelError(
                f"{model_type!r} would not be served right: with {_crowd(len(batch_ids))} its logits are off by "
                f"{error:.2g} from Transformers' (limit {limit:g}). Usual causes: layers that carry state from token "
                f"to token, or that read positions other than position_ids.{hint(lowered, ' Or a pass')}"
            )
    return ours


def _requests_of(hf_model: HFModel, program: Program, device: str) -> tuple[Requests, Requests]:
    """The check's requests. Blocks of keys lie at places that their indexer knows by tokens' positions, from 0 on."""
    is_of_blocks = hf_model.choice is not None and hf_model.choice.block > 0
    second = 0 if is_of_blocks else SECOND_REQUEST_POSITION
    return small_requests(hf_model.sizes(program.layers), device, program.rope, second)


def _counted(errors: torch.Tensor, may_be_rerouted: bool) -> float:
    """The error by which a program is judged, from its rows' errors [S]."""
    worst = errors.max().item()
    if not may_be_rerouted or not worst <= MOST_REROUTED:
        return worst
    return errors.median().item() if len(errors) > 1 else 0.0  # of one token alone nothing can be told


def _limit(lowered: Lowered, tokens: int) -> float:
    """The bound of the error of a step of so many tokens: linears may round what they read."""
    if _calls(lowered, tokens, "scaled_linear"):
        return FP8_TOLERANCE
    exact = TOLERANCE[lowered.hf_model.model.dtype]
    rounds = _calls(lowered, tokens, "rounded_panel_linear", "rounded_panel_expert_linear")
    return max(exact, INT8_TOLERANCE) if rounds else exact


def _calls(lowered: Lowered, tokens: int, *names_of_ops: str) -> bool:
    """True if pieces of a step of so many tokens call one of the ops."""
    variants: dict[str, dict[int, str]] = lowered.graph.meta.get(VARIANTS, {})
    names = []
    for name in called_pieces(lowered.graph):
        of_more = {most: variant for most, variant in variants.get(name, {}).items() if most >= tokens}
        names.append(of_more[min(of_more)] if of_more else name)
    pieces: list[Any] = [lowered.graph.get_submodule(name) for name in names]
    return any(is_op(node, *names_of_ops) for piece in pieces for node in piece.graph.nodes)


def _bound_for_adapters(
    linked: LinkedProgram, one: Lowered, by_name: Mapping[str, torch.Tensor], case: AdapterCase, device: str, rank: int
) -> Bound:
    """A program for adapters over the weights, with those of the case in its memory."""
    layout, program = case.layout, one.program
    pool = LoraPool(layout, torch.device(device), rank)
    case.write(pool)
    own = replace(program, weights=tuple(name for name in program.weights if name not in layout.shapes()))
    executor = ProgramExecutor(program, linked.pieces, {**program_weights(by_name, own, one, rank), **pool.buffers})
    return executor, tuple(AttentionLayer.of(layer, executor.weights, rank) for layer in program.layers)


def _check_adapters(
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

    ranks = [_bound_for_adapters(linked, of_lora, by_name, case, device, rank) for rank in range(lowered.num_ranks)]
    batches = batches_of(program, *_requests_of(hf_model, program, device))
    for batch_ids, batch_positions in batches:
        count = num_different(batch_ids)
        for slots in case.steps:
            of_each = [theirs_of(index, count == 1, slot) for index, slot in enumerate(slots[:count])]
            theirs = torch.cat(of_each).repeat(len(batch_ids) // count, 1)
            given = batch_ids, batch_positions, None, device, dtype, states, slots[:count]
            error = _counted(relative_errors(run_ranks(ranks, *given)[0], theirs), bool(program.expert_weights))
            limit = _limit(of_lora, sum(map(len, batch_ids))) * (1 if dtype == torch.float32 else ROUNDED_TWICE)
            if not error <= limit:
                raise UnsupportedModelError(
                    f"adapters of {hf_model.model.config.model_type!r} would not be served right: with "
                    f"{_crowd(len(batch_ids))} logits are off by {error:.2g} from Transformers' with what they add "
                    f"(limit {limit:g}). Leave out the section lora, or set lora.targets to other modules."
                    f"{hint(of_lora)}"
                )


def _check_media(
    lowered: Lowered, linked: LinkedProgram, by_name: Mapping[str, torch.Tensor], device: str, states: StateCheck
) -> str | None:
    """Runs a batch with images, where the model takes some, one with sounds, and again with adapters, where it takes
    those; returns why they would not be served right."""
    faults = (
        _check_tower(lowered, adapter, tower, linked, by_name, device, states)
        for adapter, tower in zip(lowered.adapters, lowered.of_media[1:], strict=True)
    )
    return next((fault for fault in faults if fault is not None), None)


def _check_tower(
    lowered: Lowered,
    adapter: TowerAdapter,
    tower: Lowered,
    linked: LinkedProgram,
    by_name: Mapping[str, torch.Tensor],
    device: str,
    states: StateCheck,
) -> str | None:
    """_check_media for one of the model's towers."""
    programs, hf_model = lowered.program.media, lowered.hf_model
    assert programs is not None, "a model with towers has programs of them"
    facts = adapter.facts
    vocab_size = hf_model.sizes(programs.with_features.layers).vocab_size
    case = MediaCase(adapter, vocab_size, special_ids(hf_model), device, programs.facts.axes)
    text = lowered.of_media[0]
    dtype, lengths = hf_model.model.dtype, tuple(len(ids) for ids, _ in case.prompts)

    def executor(one: Lowered, rank: int) -> ProgramExecutor:
        return ProgramExecutor(one.program, linked.pieces, program_weights(by_name, one.program, one, rank))

    def plain(rank: int) -> Bound:
        own = executor(text, rank)
        return own, tuple(AttentionLayer.of(layer, own.weights, rank) for layer in own.program.layers)

    def run(bound: Callable[[int], Bound], slots: Sequence[int]) -> torch.Tensor:
        features = features_of(executor(tower, 0), case, dtype, device)
        features = torch.nn.functional.pad(features, (0, programs.facts.feature_width - features.shape[1]))
        inputs = dict(inputs_with_features(case, features))
        if slots:
            inputs["adapter_slots"] = torch.from_numpy(np.repeat(slots, lengths).astype(np.int32)).to(device)
        blocks = case.blocks if facts.sees_ahead else ()

        def of_rank(rank: int) -> torch.Tensor:
            with current_device(torch.device(device)):
                ahead = blocks, facts.sees_ahead_in_windows
                return run_packed(*bound(rank), lengths, 1, inputs, None, device, dtype, states, *ahead)[0]

        return of_rank(0) if lowered.num_ranks == 1 else run_lockstep(lowered.num_ranks, of_rank)[0]

    def fault_of(one: Lowered, bound: Callable[[int], Bound], added: AddedToPrompts, *slots: int) -> str | None:
        ours: torch.Tensor | Exception
        try:
            ours = run(bound, slots)
        except Exception as failure:
            ours = failure
        limit = _limit(one, sum(lengths)) * (1 if dtype == torch.float32 else ROUNDED_TWICE)
        return compare_media(hf_model, adapter, case, ours, limit, hint(one), added)

    fault = fault_of(text, plain, lambda model, prompt: nullcontext())
    lora = lowered.program.lora
    if fault is not None or lora is None:
        return fault
    adapters, of_lora = AdapterCase(lora.layout, dtype, device), lowered.of_lora[1]
    slots = adapters.steps[0]
    return fault_of(
        of_lora,
        lambda rank: _bound_for_adapters(linked, of_lora, by_name, adapters, device, rank),
        lambda model, prompt: adapters.added(model, slots[prompt]),
        *slots,
    )


def _crowd(num_requests: int) -> str:
    return {1: "one token alone", 2: "two requests in one batch"}.get(
        num_requests, f"{num_requests} requests in one batch"
    )


def hint(lowered: Lowered, suspicion: str = " It may be a pass") -> str:
    """The passes that changed this model and that it can do without."""
    from mllm_compile.passes.pipeline import optional_pass_names

    optional = optional_pass_names()
    names = [report.name for report in lowered.reports if report.matches and report.name in optional]
    return f"{suspicion}: try compile.disable_passes: [{', '.join(names)}]." if names else ""
