"""Tokens drawn in verify steps have the distribution of the model, at each place of a run, whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mllm_compile.runtime.speculation.drafter import Asked, Speculation
from tests.runtime.runner_cases import VOCAB, Loop, TinyModel, make_runner
from tests.sample import slow_but_a_sample

NUM_TOKENS, NUM_REQUESTS, NUM_DRAFTED = 16, 64, 3
# 15 degrees of freedom exceed this once in a million.
MOST_CHI_SQUARE = 56.5


class OneDistribution(TinyModel):
    """Draws from the same 16 tokens after every prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.full((VOCAB,), -torch.inf)
        self.scores[:NUM_TOKENS] = torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(3)) * 1.5
        self.shares = self.scores.softmax(-1)[:NUM_TOKENS].numpy()

    def head(self, body, logits_indices):
        return self.scores.repeat(len(logits_indices), 1)


class Drafting:
    """Drafts of one kind."""

    keeps_keys, keys_reach = False, 0

    def __init__(self, kind: str, shares: np.ndarray) -> None:
        self.kind, self.shares, self.generator = kind, shares, np.random.default_rng(1)

    def propose(self, asked: Sequence[Asked]) -> list[list[int]]:
        if self.kind == "likeliest":
            return [[int(self.shares.argmax())] * one.most for one in asked]
        if self.kind == "rarest":
            return [[int(self.shares.argmin())] * one.most for one in asked]
        if self.kind == "the last token again":
            return [[one.request.output_token_ids[-1]] * one.most for one in asked]
        return [self.generator.choice(NUM_TOKENS, one.most, p=self.shares).tolist() for one in asked]

    def leave(self, request: object) -> None:
        """Keeps nothing."""

    def end(self, request: object) -> None:
        pass


KINDS = ["likeliest", "rarest", "the last token again", "drawn by its own noise"]


def check_draws(kind: str, count: int) -> None:
    """A chi-square test of each place.

    Args:
        count: tokens of verify steps.
    """
    model = OneDistribution()
    counts = np.zeros((NUM_DRAFTED + 1, NUM_TOKENS), dtype=int)
    runner = make_runner(model, max_running_requests=NUM_REQUESTS, max_num_batched_tokens=512, num_pages=1200)
    speculation = Speculation(drafter=Drafting(kind, model.shares), num_tokens=NUM_DRAFTED, vocab_size=VOCAB)
    seed = 0
    while counts.sum() < count:
        loop = Loop(runner, False, speculation)
        take = loop.scheduler.update

        def update(batch, token_ids, broken_rows, runs, take=take):
            if runs is not None:
                for run, length in zip(runs.token_ids, runs.counts, strict=True):
                    np.add.at(counts, (np.arange(length), run[:length]), 1)
            return take(batch, token_ids, broken_rows, runs)

        loop.scheduler.update = update
        for _ in range(NUM_REQUESTS):
            seed += 1
            loop.add([5, 6, 7], temperature=1.0, seed=seed, max_tokens=40)
        loop.run()
    assert counts[0].sum() > count / 3
    for place, seen in enumerate(counts):
        if seen.sum() >= 500:
            expected = model.shares * seen.sum()
            assert ((seen - expected) ** 2 / expected).sum() < MOST_CHI_SQUARE, f"place {place}"
    if kind != "rarest":
        assert counts[1].sum() >= 100, "drafts were accepted"


@pytest.mark.parametrize("kind", slow_but_a_sample(KINDS, 1))
def test_few_draws_have_the_models_distribution_at_each_place_of_a_run(kind):
    check_draws(kind, 2_500)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_draws_have_the_models_distribution_at_each_place_of_a_run(kind):
    check_draws(kind, 100_000)
