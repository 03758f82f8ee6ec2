"""Runs the compiled program on small inputs before it is published: against Transformers' own forward.

Two requests are packed into one flat batch, at far-apart positions. Where pieces have variants for few tokens, one
token alone is run too. The two requests are repeated until every kernel of the linears and the variants for any number
have run. The reference is each request alone. It differs if the model carries an unknown state, reads neighbours by
place instead of by attention, or was broken by a pass or Inductor. The weights are random_weights.py's, so an 8B model
needs one layer's memory. check/kernels.py checks what such batches do not reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mllm_compile.check.bounds import MOST_REROUTED, TOLERANCE, counted, crowd, hint, limit_of
from mllm_compile.check.compiled import linked_of_folder
from mllm_compile.check.kernels import check_written_pieces, relative_errors
from mllm_compile.check.packed_requests import REQUEST_LENGTHS, Bound, batches_of, model_requests, run_ranks, some_rows
from mllm_compile.check.seen_images import check_seen_images
from mllm_compile.check.states import StateCheck
from mllm_compile.check.towers import check_media
from mllm_compile.check.transformers_forward import logits_of_transformers, spread_of_transformers
from mllm_compile.check.weights import program_weights, quantise_weights
from mllm_compile.check.with_adapters import check_adapters
from mllm_compile.errors import CompileError, UnsupportedModelError
from mllm_compile.model.random_weights import materialise
from mllm_compile.model.refusals import first_line, refusing
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.runtime.program.link import current_device

if TYPE_CHECKING:
    from mllm_compile.compiler.lowered import Lowered


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
        quantised = {name: one for part in (lowered, *lowered.of_images) for name, one in part.quantised.items()}
        by_name = quantise_weights(hf_model.model, materialise(hf_model, device), quantised)
        linked = linked_of_folder(program, folder, piece_suffix, torch.device(device))
        ranks = [
            linked.bind(program_weights(by_name, program, lowered, rank), rank) for rank in range(lowered.num_ranks)
        ]
        states = StateCheck(of_kind(linked.layer_kernels, "state"), state_dtype)
        cache_dtype = None if kv_cache_dtype is None else getattr(torch, kv_cache_dtype)
        logits = _check_program(lowered, ranks, device, states)
        check_written_pieces(linked, page_size, hf_model.model.dtype, logits, cache_dtype)
        check_adapters(lowered, linked, by_name, device, states)
        fault = check_media(lowered, linked, by_name, device, states)
        return check_seen_images(lowered, linked, by_name, device) if fault is None else fault


def _check_program(lowered: Lowered, ranks: Sequence[Bound], device: str, states: StateCheck) -> torch.Tensor:
    """Runs every batch, on all ranks at once; returns the program's logits of the largest."""
    hf_model, program = lowered.hf_model, lowered.program
    model_type = hf_model.model.config.model_type
    batches = batches_of(program, *model_requests(hf_model, program, device))
    known: dict[int, torch.Tensor] = {}
    spreads: dict[int, torch.Tensor] = {}
    ours = torch.empty(0)
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
        limit = limit_of(lowered, sum(map(len, batch_ids)))
        errors = relative_errors(torch.cat([ours, *of_rows]), torch.cat([theirs, *(theirs[rows] for _ in of_rows)]))
        may_be_rerouted = bool(program.expert_weights) and limit > TOLERANCE[torch.float32]
        error = counted(errors, may_be_rerouted)
        is_right, is_elsewhere = error <= limit, may_be_rerouted and error > MOST_REROUTED
        if not is_right and not is_elsewhere and hf_model.model.dtype != torch.float32:
            # A row may be off by as much more as rounding alone moves it.
            spread = spread_of_transformers(hf_model, batch_ids, batch_positions, known, spreads)
            spread = torch.cat([spread, *(spread[rows] for _ in of_rows)])
            is_right = counted((errors - spread).clamp(min=0), may_be_rerouted) <= limit
        if not is_right:
            raise UnsupportedModelError(
                f"{model_type!r} would not be served right: with {crowd(len(batch_ids))} its logits are off by "
                f"{error:.2g} from Transformers' (limit {limit:g}). Usual causes: layers that carry state from token "
                f"to token, or that read positions other than position_ids.{hint(lowered, ' Or a pass')}"
            )
    return ours
