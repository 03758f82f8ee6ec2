"""Adapters of random numbers, and what a model says with them by Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mllm_compile.check.adapters import adding
from mllm_compile.runtime.lora.pool import Factors, LoraPool


def random_factors(pool: LoraPool, seed: int, rank: int | None = None, only: Sequence[str] = ()) -> Factors:
    """Factors of every target, or of those whose names end with one of `only`, that change logits by about a tenth."""
    generator = torch.Generator().manual_seed(seed)
    rank = pool.max_rank if rank is None else rank
    found = {}
    for name, target in pool.targets.items():
        a, b = (torch.randn(shape, generator=generator) for shape in target.shapes(rank))
        if not only or name.removesuffix(".weight").endswith(tuple(only)):
            found[name] = a / target.inputs**0.5, b * 0.1
    return found


@contextmanager
def merged(model: Any, factors: Factors) -> Iterator[Any]:
    """The model with W + B A in the place of each weight W, of its embedding and its head as hooks."""
    parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    stacked = {name: pair for name, pair in factors.items() if pair[0].dim() == 3}
    factors = {name: pair for name, pair in factors.items() if name not in stacked}
    ends = model.get_input_embeddings(), model.get_output_embeddings()  # one weight may be both
    apart = {name: pair for name, pair in factors.items() if model.get_submodule(name.removesuffix(".weight")) in ends}
    before = {name: parameters[name].detach().clone() for name in factors if name not in apart}
    with torch.no_grad():
        for name in before:
            a, b = factors[name]
            parameters[name] += b @ a
    try:
        with adding(model, {**apart, **stacked}):
            yield model
    finally:
        with torch.no_grad():
            for name, weight in before.items():
                parameters[name].copy_(weight)


def logprobs_of(model: Any, token_ids: Sequence[int], factors: Factors | None = None) -> torch.Tensor:
    """Log-probabilities [T, V] of a text by Transformers, with an adapter or without."""
    with merged(model, factors or {}), torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return logits.log_softmax(-1)


def greedy_of(model: Any, token_ids: Sequence[int], count: int, factors: Factors | None = None) -> list[int]:
    """The likeliest answer of `count` tokens, likewise."""
    ids = list(token_ids)
    for _ in range(count):
        ids.append(int(logprobs_of(model, ids, factors)[-1].argmax()))
    return ids[len(token_ids) :]
