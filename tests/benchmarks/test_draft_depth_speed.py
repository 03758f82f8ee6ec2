"""The script that times drafts tells how near a tie the tokens are at which answers part."""

from __future__ import annotations

import pytest

from benchmarks.script import greedy
from benchmarks.steps.draft_depth_speed import margins
from mllm_compile import Engine
from tests.tiny_model import tiny_config

PROMPT = [5, 9, 2]


def test_tokens_at_which_answers_part_are_told_by_their_log_probabilities(eager_cache):
    with Engine(tiny_config(eager_cache, compile={"backend": "eager"})) as engine:
        (output,) = engine.generate([PROMPT], greedy(6, logprobs=2))
        answer, entry = output.token_ids, output.logprobs[3]
        (other,) = {*entry} - {answer[3]}
        parted = [*answer[:3], other, *answer[4:]]
        found = margins(engine, [PROMPT] * 2, [answer, parted], [answer, answer])
    assert found == [pytest.approx(entry[answer[3]].logprob - entry[other].logprob, abs=1e-4)]
    assert found[0] > 0.01
