"""Steps of packed sequences have the rows and pages that they need, whatever the sequences are."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile.train.scoring import _steps, _Tables, pages_needed


def runner_of(page_size: int, longest: int, tokens: int, requests: int) -> Any:
    runtime = SimpleNamespace(
        page_size=page_size, max_model_len=longest, max_num_batched_tokens=tokens, max_running_requests=requests
    )
    config = SimpleNamespace(runtime=runtime)
    return SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        token_to_kv_pool=SimpleNamespace(num_pages=pages_needed(config), page_size=page_size),  # type: ignore[arg-type]
        req_to_token_pool=SimpleNamespace(write_pages=lambda *_: None),
    )


def most_pages(runner: Any, lengths: list[int]) -> int:
    """Pages that the sequences take at most, the dummy page included; each token has a slot that no other has."""
    runtime, tables, most = runner.config.runtime, _Tables(runner), 0
    held: dict[int, set[int]] = {}
    for spans in _steps(lengths, runtime.max_num_batched_tokens, runtime.max_running_requests):
        assert len(spans) <= runtime.max_running_requests
        _, _, slots = tables.enter(spans)
        for span, its in zip(
            spans, np.split(slots, np.cumsum([one.end - one.start for one in spans])[:-1]), strict=True
        ):
            held.setdefault(span.sequence, set()).update(its.tolist())
        assert len(set().union(*held.values())) == sum(map(len, held.values())) and min(map(min, held.values())) > 0
        most = max(most, 1 + sum(len(pages) for pages in tables._pages.values()))
        ended = [span.sequence for span in spans if span.end == lengths[span.sequence]]
        tables.leave(ended)
        for sequence in ended:
            assert len(held.pop(sequence)) == lengths[sequence]
    assert not tables._pages and not tables._rows
    return most


def test_any_sequences_find_their_pages():
    generator, fullest = random.Random(1), 0.0
    for _ in range(400):
        page_size, longest = generator.choice((1, 3, 4, 16)), generator.randint(1, 70)
        runner = runner_of(page_size, longest, generator.randint(1, 40), generator.randint(1, 12))
        lengths = [
            generator.choice((1, longest, min(page_size + 1, longest), generator.randint(1, longest)))
            for _ in range(generator.randint(1, 40))
        ]
        most = most_pages(runner, lengths)
        fullest = max(fullest, most / runner.token_to_kv_pool.num_pages)
    assert 0.8 < fullest <= 1, "the bound is near"


@pytest.mark.parametrize("rest", [1, 5, 16])
def test_a_long_sequence_that_ends_in_a_step_of_short_ones_has_room(rest):
    runner = runner_of(page_size=4, longest=64, tokens=16, requests=8)
    assert most_pages(runner, [16 - rest, 64, *[5] * 20]) <= runner.token_to_kv_pool.num_pages
