"""Penalties against Transformers' and by hand; counts of tokens as requests come, grow in number and go."""

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from mllm_compile.runtime.sampling.penalties import PenaltyParams, TokenCounts, TokenHistories, apply_penalties
from tests.runtime.sampling.sampling_cases import random_logits

CPU = torch.device("cpu")


def penalise(logits, prompt_mask, output_counts, repetition=1.0, frequency=0.0, presence=0.0):
    rows = logits.shape[0]
    params = PenaltyParams(
        repetition_penalties=torch.full((rows,), repetition),
        frequency_penalties=torch.full((rows,), frequency),
        presence_penalties=torch.full((rows,), presence),
        token_histories=TokenHistories(prompt_mask=prompt_mask, output_counts=output_counts),
    )
    penalised = logits.clone()
    apply_penalties(penalised, params)
    return penalised


def test_the_repetition_penalty_is_transformers_over_prompt_and_output():
    logits = random_logits(2)
    counts = TokenCounts(300, CPU)
    prompt, output = [1, 2, 2, 9], [9, 30, 30]
    rows = torch.tensor([counts.allocate(prompt, output)] * 2)
    history = counts.gather(rows)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output] * 2), logits.clone())
    assert torch.equal(penalise(logits, history.prompt_mask, history.output_counts, repetition=1.7), expected)


def test_frequency_and_presence_count_the_output_only():
    logits = torch.zeros(1, 6)
    prompt_mask = torch.tensor([[True, True, False, False, False, False]])
    output_counts = torch.tensor([[0, 1, 3, 0, 0, 0]], dtype=torch.int32)
    penalised = penalise(logits, prompt_mask, output_counts, frequency=0.5, presence=0.25)
    assert penalised.tolist() == [[0, -0.75, -1.75, 0, 0, 0]]


def test_penalties_that_are_off_leave_every_bit():
    logits = random_logits(4, spread=30)
    counted = torch.ones(4, 300, dtype=torch.int32)
    assert torch.equal(penalise(logits, counted > 0, counted), logits)


def test_tokens_are_counted_one_a_row():
    counts = TokenCounts(10, CPU)
    first, second = counts.allocate([1], []), counts.allocate([2], [5, 5])
    rows = torch.tensor([first, 0, second, 0])
    counts.record(rows, torch.tensor([7, 3, 5, 3]))
    history = counts.gather(torch.tensor([first, second]))
    assert history.output_counts.tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 3, 0, 0, 0, 0]]
    assert history.prompt_mask.int().argmax(-1).tolist() == [1, 2]


def test_growing_keeps_the_counts_and_a_freed_row_starts_clean():
    counts = TokenCounts(10, CPU)
    rows = [counts.allocate([i % 10], [i % 10] * i) for i in range(50)]
    assert len(set(rows)) == 50
    assert 0 not in rows
    assert counts.gather(torch.tensor(rows)).output_counts.sum(-1).tolist() == list(range(50))
    counts.free(rows[49])
    reused = counts.allocate([], [])
    assert reused == rows[49]
    history = counts.gather(torch.tensor([reused]))
    assert not history.output_counts.any()
    assert not history.prompt_mask.any()
