"""Transformers' own forward of the requests of a self-check, each alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.check.packed_requests import Requests, few_of, num_different
from mllm_compile.check.spread import spread_of_rows
from mllm_compile.model.attention_hook import attention_implementation
from mllm_compile.model.positions_hook import reading_positions
from mllm_compile.model.written_attention.chosen import choosing_few

if TYPE_CHECKING:
    from mllm_compile.model.hf_model import HFModel


def logits_of_transformers(
    hf_model: HFModel, ids: Requests, positions: Requests, known: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Runs each request once, and takes `known` from then on, by how many there are."""
    count = num_different(ids)
    if count not in known:
        known[count] = run_transformers(hf_model, ids[:count], positions[:count])
    return known[count].repeat(len(ids) // count, 1)


def spread_of_transformers(
    hf_model: HFModel,
    ids: Requests,
    positions: Requests,
    known: Mapping[int, torch.Tensor],
    spreads: dict[int, torch.Tensor],
) -> torch.Tensor:
    """How much rounding moves each row of `logits_of_transformers`, [S]; found once, and in `spreads` from then on."""
    count = num_different(ids)
    if count not in spreads:
        run = functools.partial(run_transformers, hf_model, ids[:count], positions[:count])
        spreads[count] = spread_of_rows(hf_model.model, run, known[count], hf_model.model.dtype)
    return spreads[count].repeat(len(ids) // count)


def run_transformers(hf_model: HFModel, ids: list[torch.Tensor], positions: list[torch.Tensor]) -> torch.Tensor:
    """Runs each request alone, with the model's own attention and masks.

    Eager attention where there is one: it has all that the model says, while sdpa drops soft caps in silence up to
    Transformers 5.17. A request that begins at 0 is not told its positions: some models count them from elsewhere.
    """
    model: Any = hf_model.model

    def run_alone(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor
        if positions[0] == 0:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            return logits
        told = positions + hf_model.position_offset
        with reading_positions(model, lambda counted: told.view(counted.shape)):
            logits = model(input_ids=ids[None], position_ids=told[None], use_cache=False).logits[0]
            return logits

    def run(implementation: str) -> torch.Tensor:
        few: AbstractContextManager[None] = nullcontext()
        if hf_model.chooses_keys and hf_model.choice is not None:
            few = choosing_few(model, few_of(hf_model.choice))
        with torch.no_grad(), attention_implementation(model, implementation), _without_advice(), few:
            return torch.cat([run_alone(*request) for request in zip(ids, positions, strict=True)])

    try:
        return run("eager")
    except Exception:  # not every model has it
        return run("sdpa")


@contextmanager
def _without_advice() -> Iterator[None]:
    """Transformers does not say within the context which packages would make its recurrences faster: none is served."""

    def is_other(record: logging.LogRecord) -> bool:
        return "is falling back to its reference" not in record.getMessage()

    logger = logging.getLogger("transformers.integrations.hub_kernels")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
