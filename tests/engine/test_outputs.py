"""Answers and stream pieces, made from what the engine's thread collected."""

import numpy as np
import pytest

from mllm_compile.engine.answers import StreamBuilder, build_answer
from mllm_compile.engine.outputs import Logprob, VocabularyLogprobs
from mllm_compile.engine.sequences import Delta, Submission
from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.step.output import TokenScores
from tests.fakes import ByteTokenizer

A, B, C = b"abc"


def submission_of(token_ids, scores=(), prompt_scores=(), **params):
    submission = Submission(
        "id",
        "xy",
        [1, 2, 3],
        SamplingParams(**({"temperature": 0} | params)),
        eos_token_ids=frozenset(),
        priority=0,
        decoder=ByteTokenizer(),
    )
    request = submission.sequences[0].request
    request.output_token_ids += token_ids
    request.output_logprobs += scores
    request.prompt_logprobs += prompt_scores
    return submission


def finished(submission, reason="length"):
    submission.sequences[0].request.finish_reason = reason
    submission.sequences[0].end()
    return submission


SCORES = [TokenScores(A, -0.5, 1, ((A, -0.5), (B, -1.0))), TokenScores(C, -3.0, 7, ((A, -0.1), (B, -2.5)))]


def test_the_first_completion_can_be_read_on_the_output_itself():
    output = build_answer(finished(submission_of([A, B])), ByteTokenizer())
    assert (output.text, output.token_ids, output.finish_reason, output.logprobs) == ("ab", [A, B], "length", None)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("id", "xy", [1, 2, 3])
    assert output.outputs[0].finished and output.outputs[0].cumulative_logprob is None


def test_logprobs_hold_the_sampled_token_and_the_alternatives():
    output = build_answer(finished(submission_of([A, C], SCORES, logprobs=2)), ByteTokenizer())
    assert output.logprobs == [
        {A: Logprob(-0.5, 1, "a"), B: Logprob(-1.0, 2, "b")},
        {C: Logprob(-3.0, 7, "c"), A: Logprob(-0.1, 1, "a"), B: Logprob(-2.5, 2, "b")},
    ]
    assert output.outputs[0].cumulative_logprob == pytest.approx(-3.5)


def test_prompt_logprobs_start_with_none():
    submission = finished(submission_of([A], prompt_scores=SCORES, prompt_logprobs=2))
    output = build_answer(submission, None)
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[2][C] == Logprob(-3.0, 7, None)
    assert output.logprobs is None


def test_text_is_not_made_when_it_is_not_wanted():
    assert build_answer(finished(submission_of([A], detokenize=False)), ByteTokenizer()).text == ""


def test_a_refused_prompt_has_no_tokens_and_says_why():
    submission = submission_of([])
    submission.refuse(RequestError("too long"))
    output = build_answer(submission, ByteTokenizer())
    assert (output.finish_reason, output.error, output.token_ids, output.text) == ("error", "too long", [], "")
    assert output.metrics.time_to_first_token is None and output.metrics.tokens_per_second is None


def test_each_stream_output_holds_what_is_new():
    submission = submission_of([], prompt_scores=SCORES, logprobs=2, prompt_logprobs=2)
    builder = StreamBuilder(submission, ByteTokenizer())
    euro = list("€".encode())
    first = builder.build([Delta(0, [A], SCORES[:1], None, None, None)], False)
    second = builder.build(
        [Delta(0, euro[:2], [], None, None, None), Delta(0, [*euro[2:], C], SCORES[1:], None, "stop", C)], True
    )
    assert (first.text, first.token_ids, first.finished, first.metrics) == ("a", [A], False, None)
    assert first.outputs[0].cumulative_logprob == -0.5 and len(first.logprobs) == 1
    assert len(first.prompt_logprobs) == 3 and second.prompt_logprobs is None
    assert (second.text, second.token_ids) == ("€", [*euro, C])  # the stop token is no text
    assert (second.finished, second.finish_reason, second.outputs[0].stop_reason) == (True, "stop", C)
    assert list(second.logprobs[0]) == [C, A, B]


def test_what_a_stream_says_of_the_first_completion_is_of_the_first():
    builder = StreamBuilder(submission_of([], n=2, logprobs=2, temperature=1.0), ByteTokenizer())
    second = Delta(1, [B], SCORES[:1], None, "length", None)
    alone = builder.build([second], False)
    assert (alone.text, alone.token_ids, alone.finish_reason, alone.logprobs) == ("", [], None, None)
    both = builder.build([second, Delta(0, [A], SCORES[:1], None, None, None)], False)
    assert [completion.index for completion in both.outputs] == [0, 1]
    assert (both.text, both.token_ids, both.finish_reason) == ("a", [A], None)


def test_log_probabilities_of_the_whole_vocabulary_are_a_mapping_best_first():
    logprobs = np.full(260, -9.0, dtype=np.float32)
    logprobs[[A, B]] = -0.5, -1.0
    scores = [TokenScores(B, -1.0, 2, (), logprobs), TokenScores(A, -0.5, 1, (), logprobs)]
    output = build_answer(submission_of([B, A], scores, logprobs=-1), ByteTokenizer()).outputs[0]
    entry = output.logprobs[0]
    assert isinstance(entry, VocabularyLogprobs)
    assert (len(entry), list(entry)[:2], entry[B]) == (260, [A, B], Logprob(-1.0, 2, "b"))
    assert entry[C] == Logprob(-9.0, 3, "c")
    assert entry.get(260) is entry.get(-1) is None
    assert output.cumulative_logprob == -1.5
    assert max(entry.values(), key=lambda one: one.logprob) == Logprob(-0.5, 1, "a")
