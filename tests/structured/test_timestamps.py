"""Whisper's rule of times, against Transformers' own processor of logits."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.grammar import MaskWork
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.runtime.sampling.token_masks import TokenMasks
from mllm_compile.structured.grammars import Grammars
from mllm_compile.structured.timestamps import TimesGrammar
from mllm_compile.structured.vocabulary import Vocabulary

VOCAB, END, NO_TIMESTAMPS = 150, 40, 60
BEGINNING = [41, 42]  # tokens ahead of an answer


def processor() -> Any:
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    config = SimpleNamespace(
        no_timestamps_token_id=NO_TIMESTAMPS, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=50
    )
    return WhisperTimeStampLogitsProcessor(config, begin_index=len(BEGINNING))


def test_answers_are_masked_as_by_transformers() -> None:
    rng, theirs, grammar = random.Random(0), processor(), TimesGrammar(NO_TIMESTAMPS, END, VOCAB)
    torch.manual_seed(0)
    places = TokenMasks(6, VOCAB, torch.device("cpu"))
    forced = 0
    for _ in range(30):
        matchers, answers = [grammar.matcher() for _ in range(3)], [list[int]() for _ in range(3)]
        news: list[list[int]] = [[] for _ in range(3)]
        for _ in range(12):
            work = [MaskWork(one, new, row) for row, (one, new) in enumerate(zip(matchers, news, strict=True))]
            assert grammar.fill(work, places.begin()) == {}
            logits = torch.randn(4, VOCAB) * 2
            logits[:, NO_TIMESTAMPS + 1 :] += rng.choice((-4.0, 0.0))
            mask = places.send(3, np.array([0, 1, 3]), None, (grammar.first_time, np.ones(3, dtype=bool)))
            ours = mask.forbid_others(logits)
            assert torch.equal(ours[2], logits[2])
            for row, answer in zip((0, 1, 3), answers, strict=True):
                expected = theirs(torch.tensor([[*BEGINNING, *answer]]), logits[row : row + 1])[0]
                assert torch.equal(ours[row], expected), answer
                forced += bool(answer) and bool(torch.isinf(expected[: NO_TIMESTAMPS + 1]).all())
            chosen = [int(ours[row].softmax(-1).multinomial(1)) for row in (0, 1, 3)]
            news = [[one] for one in chosen]
            for answer, token in zip(answers, chosen, strict=True):
                answer.append(token)
    assert forced, "no time was forced by probabilities"


def test_a_row_without_times_is_left_alone_by_the_rule_of_probabilities() -> None:
    places = TokenMasks(2, VOCAB, torch.device("cpu"))
    places.begin()[:] = -1
    logits = torch.zeros(2, VOCAB)  # all times together are likelier than any text
    mask = places.send(2, None, None, (NO_TIMESTAMPS + 1, np.array([True, False])))
    ours = mask.forbid_others(logits)
    assert torch.isinf(ours[0, : NO_TIMESTAMPS + 1]).all()
    assert torch.equal(ours[1], logits[1])


def grammars_of(no_timestamps: int | None) -> Grammars:
    vocabulary = Vocabulary.of([b"a"] * VOCAB, [END], [], no_timestamps)
    return Grammars(lambda: vocabulary, (), 1)


@pytest.mark.parametrize("given", [-3, 0, NO_TIMESTAMPS - 1, VOCAB - 1, 10**30])
def test_one_request_cannot_say_which_tokens_are_times_of_all(given: int) -> None:
    grammars, asked = grammars_of(NO_TIMESTAMPS), StructuredOutputsParams(timestamps=given)
    assert grammars.compile(StructuredOutputsParams(timestamps=NO_TIMESTAMPS)).first_time == NO_TIMESTAMPS + 1
    with pytest.raises(RequestError, match=f"expected {NO_TIMESTAMPS}, got {given}"):
        grammars.compile(asked)
    with pytest.raises(RequestError, match=f"tokenizer has no <.notimestamps.>, got {given}"):
        grammars_of(None).compile(asked)
    if given == VOCAB - 1:
        with pytest.raises(RequestError, match=f"below {VOCAB - 1}, got {given}"):
            grammars_of(given).compile(asked)
    with pytest.raises(RequestError, match="a token id"):
        StructuredOutputsParams(timestamps=True)
