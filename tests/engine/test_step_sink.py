"""A sink that is told once a step: all tokens in arrays, and ends by themselves."""

from __future__ import annotations

from typing import Any

from mllm_compile.engine.streams import Countdown
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.backend.step_events import StepEvents
from mllm_compile.server.wire import messages
from tests.fakes import ENDLESS, EOS, ROOM_FOR_ENDLESS, FakeStepRunner, expected_tokens, fake_engine, recite
from tests.hang_guard import until


class Front:
    """Collects what is sent."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.rows: dict[int, tuple[int, int]] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[int, Any] = {}
        self.scores: list[Any] = []
        self.drafts: list[Any] = []

    def read(self) -> None:
        for frame in list(self.frames):
            rows, tokens, rest = messages.decode_step(frame)
            for admitted in rest.admitted if rest else ():
                self.rows[admitted.row] = (admitted.key, admitted.index)
            for row, token in zip(rows, tokens, strict=True):
                self.tokens.setdefault(self.rows[row], []).append(token)
            for end in rest.ended if rest else ():
                self.ends[end.key] = end
            self.scores += rest.scores if rest else ()
            self.drafts += rest.drafts if rest else ()
        self.frames.clear()


def served(engine: Any, prompts: list[list[int]], params: SamplingParams) -> Front:
    front = Front()
    events = StepEvents(front.frames.append, str)
    engine.core.tell_steps(events)
    submissions = [engine.builder.build_one(prompt, params) for prompt in prompts]
    for key, submission in enumerate(submissions):
        events.take(key, submission)
    engine.core.submit(submissions)

    def all_ended() -> bool:
        front.read()
        return len(front.ends) == len(prompts)

    until(all_ended)
    return front


def test_tokens_come_with_their_rows_and_no_request_is_watched_by_itself():
    with fake_engine() as engine:
        prompts = [[1, 2, 3], [4, 5], [6] * 9, [7], [8, 9], [10]]  # more than can run: rows are used again
        front = served(engine, prompts, SamplingParams(temperature=0, max_tokens=7, ignore_eos=True))
        for key, prompt in enumerate(prompts):
            assert front.tokens[key, 0] == expected_tokens(prompt, 7)
            assert front.ends[key].reasons == [("length", None)]
        assert not engine.core._requests._watched


def test_each_completion_of_a_prompt_has_its_own_row_and_end():
    with fake_engine() as engine:
        front = served(engine, [[1, 2, 3]], SamplingParams(n=3, max_tokens=5, ignore_eos=True))
        assert sorted(front.tokens) == [(0, 0), (0, 1), (0, 2)]
        assert front.ends[0].reasons == [("length", None)] * 3


def test_the_token_that_ends_an_answer_comes_with_its_end():
    with fake_engine(FakeStepRunner(recite("hi"))) as engine:
        front = served(engine, [list(b"say:")], SamplingParams(temperature=0, logprobs=2))
        assert front.tokens[0, 0] == [*b"hi", EOS]
        assert front.ends[0].reasons == [("stop", None)]
        assert [scores.token_id for _, scores in front.scores] == [*b"hi", EOS]


def test_an_engine_that_ends_tells_every_request_that_waits():
    runner = FakeStepRunner()
    front = Front()
    events = StepEvents(front.frames.append, str)
    with fake_engine(runner, **ROOM_FOR_ENDLESS) as engine:
        engine.core.tell_steps(events)
        submissions = [engine.builder.build_one([1, 2], SamplingParams(max_tokens=ENDLESS)) for _ in range(6)]
        for key, submission in enumerate(submissions):
            events.take(key, submission)
        engine.core.submit(submissions)
        until(lambda: runner.batches)
    front.read()
    assert {key: end.reasons for key, end in front.ends.items()} == {key: [("abort", None)] for key in range(6)}


def test_a_refusal_is_told_though_no_step_runs():
    with fake_engine(num_pages=5) as engine:
        front = served(engine, [[1] * 30], SamplingParams(max_tokens=30))
        assert front.ends[0].error_kind == "RequestError"
        assert "KV pages" in front.ends[0].error


def test_other_sinks_are_told_beside_it():
    with fake_engine() as engine:
        engine.core.tell_steps(StepEvents([].append, str))
        submission = engine.builder.build_one([1], SamplingParams(max_tokens=3, ignore_eos=True))
        submission.sink = Countdown([submission])
        engine.core.submit([submission])
        submission.sink.wait()
        assert submission.sequences[0].request.output_token_ids == expected_tokens([1], 3)
