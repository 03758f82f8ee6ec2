"""Running requests: their news in one call a step, merged for a slow reader, within bounds."""

from __future__ import annotations

import array
import asyncio
import gc
import json
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from mllm_compile.errors import MllmError
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.api.answers import CompletionAnswers
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.flow import dispatcher as dispatcher_module
from mllm_compile.server.flow.admission import Admission
from mllm_compile.server.flow.choice import PromptRun
from mllm_compile.server.flow.dispatcher import Dispatcher
from mllm_compile.server.flow.job import Job
from mllm_compile.server.flow.writer import Outlet, Writer
from mllm_compile.server.wire import messages
from mllm_compile.server.wire.messages import Abort, Admitted, StepRest
from tests.fakes import ByteTokenizer


class Client:
    """A reader that can stop reading."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        self.sent.append(message)

    def write_chunk(self, body: bytes) -> bool:
        if not self.reads.is_set():
            return False
        self.sent.append({"type": "of one call", "body": body, "more_body": True})
        return True

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def events(self) -> list[Any]:
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    @property
    def texts(self) -> list[str]:
        return [event["choices"][0]["text"] for event in self.events]

    @property
    def is_complete(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False


async def turns() -> None:
    """Lets all that can go on do so: nothing here waits for anything outside."""
    for _ in range(20):
        await asyncio.sleep(0)


class Engine:
    """Sends what an engine sends."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.admitted = 0
        self.over: list[Job] = []
        self.dispatcher = Dispatcher(self.commands.append, self._admitted)

    def _admitted(self) -> None:
        self.admitted += 1

    def start(self, client: Client, *, row: int, tokenizer: Any = None, **fields: Any) -> Job:
        params = SamplingParams(**{"max_tokens": 100, **fields})
        head = {"id": f"cmpl-{row}", "created": 0, "model": "m", "system_fingerprint": None}
        job = Job(
            f"cmpl-{row}",
            CompletionAnswers(head, None),
            Outlet(client.send, client.write_chunk),
            is_stream=True,
            stream_interval=1,
            headers=[],
            cancel=self.dispatcher.cancel,
            on_over=self.over.append,
        )
        job.add(PromptRun(self.dispatcher.next_key(), [1], None, False), params, tokenizer or ByteTokenizer())
        self.dispatcher.start(job, params, 0, None)
        key = job.prompts[0].key
        self.step({}, StepRest(admitted=[Admitted(key, 0, row, 0, 0.0)]))
        return job

    def step(self, tokens: dict[int, str], rest: StepRest | None = None) -> None:
        rows = array.array("i", tokens.keys()).tobytes()
        ids = array.array("i", [ord(text) for text in tokens.values()]).tobytes()
        self.dispatcher.on_step(messages.encode_step(rows, ids, rest or StepRest()))

    def end(self, job: Job, reason: str) -> None:
        self.step({}, StepRest(ended=[messages.end_of(job.prompts[0].key, [(reason, None)], None)]))


def test_a_request_that_is_over_is_nobodys_circle():
    """A prompt of 100,000 tokens takes megabytes, until the collector looks."""

    async def run() -> None:
        engine = Engine()
        job = engine.start(Client(), row=1)
        engine.step({1: "a"})
        engine.end(job, "stop")
        assert engine.over == [job]
        engine.over.clear()
        engine.step({}, StepRest())  # the next step's row is another's
        engine.dispatcher._by_row.clear()
        prompt = weakref.ref(job.prompts[0])
        gc.disable()
        try:
            del job
            assert prompt() is None
        finally:
            gc.enable()

    asyncio.run(run())


def test_a_step_is_told_at_once_and_a_slow_reader_gets_its_news_in_one():
    async def run() -> None:
        engine, quick, slow = Engine(), Client(), Client()
        jobs = [engine.start(quick, row=1), engine.start(slow, row=2)]
        engine.step({1: "a", 2: "a"})
        assert quick.texts == slow.texts == ["a"], "without a turn of the loop"
        slow.reads.clear()
        for letter in "bcde":
            engine.step({1: letter, 2: letter})
        assert quick.texts == list("abcde")
        slow.reads.set()
        await turns()
        assert slow.texts == ["a", "b", "cde"], "one was on its way, the others are merged"
        slow.reads.clear()
        engine.step({1: "f", 2: "f"})
        engine.step({1: "g", 2: "g"})
        for job in jobs:
            engine.end(job, "length")
        assert quick.is_complete
        assert not slow.is_complete
        slow.reads.set()
        await turns()
        assert slow.is_complete
        assert "".join(slow.texts) == "".join(quick.texts) == "abcdefg"
        assert slow.body.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


@pytest.mark.parametrize("takes_chunks", [True, False])
def test_parts_of_a_body_are_written_in_one_call_where_that_can_be(takes_chunks):
    async def main() -> None:
        client = Client()
        writer = Writer(Outlet(client.send, client.write_chunk if takes_chunks else None), lambda: None)
        writer.begin(200, [])
        writer.write(b"a")
        client.reads.clear()
        writer.write(b"b")
        client.reads.set()
        writer.write(b"c")  # behind waiting requests
        await turns()
        writer.write(b"d")
        writer.write(b"", more=False)
        assert client.body == b"abcd" and client.is_complete
        kinds = [message["type"] for message in client.sent[1:]]
        plain, once = "http.response.body", "of one call" if takes_chunks else "http.response.body"
        assert kinds == [once, plain, plain, once, plain]

    asyncio.run(main())


def test_a_slow_reader_is_told_once_that_one_of_its_answers_has_ended():
    async def run() -> None:
        engine, client = Engine(), Client()
        job = engine.start(client, row=1, n=2, stop=["z"], temperature=1.0, seed=0)
        engine.step({}, StepRest(admitted=[Admitted(job.prompts[0].key, 1, 2, 0, 0.0)]))
        engine.step({1: "a", 2: "a"})
        engine.step({1: "z", 2: "b"})  # the first one ends
        client.reads.clear()
        engine.step({2: "c"})
        engine.step({2: "d"})
        client.reads.set()
        await turns()
        engine.step({2: "z"})
        await turns()
        ends = [choice["index"] for event in client.events for choice in event["choices"] if choice["finish_reason"]]
        assert sorted(ends) == [0, 1]
        assert client.is_complete

    asyncio.run(run())


def test_a_reader_that_takes_nothing_is_given_up(monkeypatch):
    async def run() -> None:
        engine, slow = Engine(), Client()
        job = engine.start(slow, row=1)
        engine.step({1: "a"})
        slow.reads.clear()
        engine.step({1: "b"})
        monkeypatch.setattr(dispatcher_module, "SLOW_S", 0.0)
        engine.dispatcher.sweep(None, None)
        assert (job.is_over, job.status) == (True, 499)
        assert engine.commands[-1] == Abort(job.prompts[0].key)
        await asyncio.sleep(0)

    asyncio.run(run())


def test_a_stream_that_waits_says_so_now_and_then(monkeypatch):
    async def run() -> None:
        engine, client = Engine(), Client()
        engine.start(client, row=1)
        monkeypatch.setattr(dispatcher_module, "COMMENT_S", 0.0)
        engine.dispatcher.sweep(None, None)
        assert client.body == b": working\n\n"
        engine.step({1: "a"})
        assert client.texts == ["a"]

    asyncio.run(run())


def test_a_stream_that_cannot_be_told_ends_alone(monkeypatch):
    async def run() -> None:
        engine, others = Engine(), Client()
        lost = engine.start(Client(), row=1)
        engine.start(others, row=2)
        monkeypatch.setattr(dispatcher_module, "COMMENT_S", 0.0)
        monkeypatch.setattr(lost, "comment", lambda text, now: 1 / 0)
        engine.dispatcher.sweep(None, None)
        assert (lost.is_over, lost.status) == (True, 500)
        assert others.body == b": working\n\n"

    asyncio.run(run())


def test_a_stop_text_ends_a_stream_here_and_tells_the_engine():
    async def run() -> None:
        engine, client = Engine(), Client()
        job = engine.start(client, row=1, stop=["cd"])
        assert "stop" not in engine.commands[0].params
        for letter in "abcde":
            engine.step({1: letter})
        assert "".join(client.texts) == "ab"
        assert client.is_complete
        assert client.events[-1]["choices"][0]["stop_reason"] == "cd"
        assert engine.commands[-1] == Abort(job.prompts[0].key)
        assert engine.over == [job]

    asyncio.run(run())


def test_an_end_that_the_engine_has_told_is_not_told_back():
    async def run() -> None:
        engine, client = Engine(), Client()
        job = engine.start(client, row=1)
        key = job.prompts[0].key
        engine.step(
            {1: "a"},
            StepRest(finished=[(key, 0, "length", None)], ended=[messages.end_of(key, [("length", None)], None)]),
        )
        assert client.is_complete
        assert not any(isinstance(command, Abort) for command in engine.commands)

    asyncio.run(run())


def test_a_row_stands_for_the_request_that_has_it_now():
    async def run() -> None:
        engine, first, second = Engine(), Client(), Client()
        job = engine.start(first, row=1)
        engine.step({1: "a"})
        job.leave()
        engine.step({1: "b"})
        engine.start(second, row=1)
        engine.step({1: "c"})
        assert (first.texts, second.texts) == (["a"], ["c"])

    asyncio.run(run())


def test_what_is_refused_late_is_an_error_response_and_after_the_head_an_event():
    async def run() -> None:
        engine, refused, failed = Engine(), Client(), Client()
        jobs = [engine.start(refused, row=1), engine.start(failed, row=2)]
        engine.step({2: "a"})
        engine.dispatcher.fail_all(ApiError(503, "gone", code="engine_lost"))
        assert refused.sent[0]["status"] == 503
        assert json.loads(refused.body)["error"]["code"] == "engine_lost"
        assert failed.sent[0]["status"] == 200
        assert failed.events[-1]["error"]["message"] == "gone"
        assert [job.status for job in jobs] == [503, 503]
        assert engine.dispatcher.is_idle

    asyncio.run(run())


class FailsAtX(ByteTokenizer):
    """A tokenizer whose code fails at some tokens."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, *, as_it_is: bool = False) -> str:
        if ord("x") in token_ids:
            raise self._error
        return super().decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize(
    ("error", "code"), [(MllmError("no text of these"), "engine_error"), (KeyError("x"), "internal_error")]
)
def test_a_tokenizer_that_fails_ends_its_own_request_alone(error, code):
    async def run() -> None:
        engine, broken, other = Engine(), Client(), Client()
        job = engine.start(broken, row=1, tokenizer=FailsAtX(error))
        engine.start(other, row=2)
        for letter in "axb":
            engine.step({1: letter, 2: letter})
        assert broken.events[-1]["error"]["code"] == code
        assert broken.is_complete
        assert job.status == 500
        assert engine.commands[-1] == Abort(job.prompts[0].key)
        assert "".join(other.texts) == "axb"

    asyncio.run(run())


def test_the_queue_is_bounded_and_a_long_list_is_taken_when_it_is_empty():
    admission = Admission(3, lambda: 8)
    admission.engine_ready(8)
    admission.enter(5)
    with pytest.raises(ApiError) as caught:
        admission.enter(1)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    for _ in range(3):
        admission.leave()
    admission.enter(1)
    assert (admission.waiting, admission.refused) == (3, 1)
    admission.enter(1, is_bounded=False)
    assert (admission.waiting, admission.refused) == (4, 1), "one that has begun goes on"


@pytest.mark.parametrize(("running", "taken"), [(0, 10), (5, 5), (8, 2), (9, 2)])
def test_requests_with_a_slot_at_once_are_not_bounded(running, taken):
    admission = Admission(2, lambda: running)
    admission.engine_ready(8)
    for _ in range(taken):
        admission.enter(1)
    with pytest.raises(ApiError, match=f"{taken} prompts wait, of at most {taken}"):
        admission.enter(1)


@pytest.mark.parametrize(("asked", "taken"), [(None, 256), (2, 258)])
def test_requests_before_the_engine_is_ready_are_bounded_too(asked, taken):
    admission = Admission(asked, lambda: 0)
    for _ in range(taken):
        admission.enter(1)
    with pytest.raises(ApiError, match="Ask again later"):
        admission.enter(1)


def test_a_request_for_texts_holds_its_place_until_it_is_over():
    admission = Admission(2, lambda: 0)
    admission.engine_ready(3)
    with admission.place() as place:
        assert admission.waiting == 1, "until it is read how many there are"
        place.hold(4)
        with pytest.raises(ApiError, match="4 prompts wait, of at most 5"), admission.place() as other:
            other.hold(2)
        with admission.place():
            assert admission.waiting == 5
            with pytest.raises(ApiError, match="5 prompts wait"):
                admission.place()
    assert (admission.waiting, admission.refused) == (0, 2)
    with admission.place(), pytest.raises(ApiError, match="The request has 9: send them in parts"):
        admission.enter(9)
    with admission.place() as place:
        place.hold(9)
        assert admission.waiting == 9, "a long list is taken when nothing else waits"
    assert admission.waiting == 0


def test_running_requests_are_counted_only_where_many_wait():
    def count() -> int:
        raise AssertionError("counted")

    admission = Admission(3, count)
    for _ in range(3):
        admission.enter(1)
    with pytest.raises(AssertionError, match="counted"):
        admission.enter(1)


def test_a_completion_that_has_ended_has_no_slot():
    async def run() -> None:
        engine = Engine()
        first = engine.start(Client(), row=1)
        engine.start(Client(), row=2)
        assert engine.dispatcher.num_running() == 2
        engine.end(first, "length")
        assert engine.dispatcher.num_running() == 1

    asyncio.run(run())


def test_the_bound_of_the_queue_follows_from_what_can_run():
    admission = Admission(None, lambda: 0)
    admission.engine_ready(16)
    assert admission.most == 64
    asked = Admission(7, lambda: 0)
    asked.engine_ready(16)
    assert asked.most == 7
