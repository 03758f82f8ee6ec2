"""The queue of requests whose form is compiled, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mllm_compile.errors import MllmError, RequestError
from mllm_compile.server.backend.form_queue import FormQueue, TooManyFormsError
from mllm_compile.server.wire.messages import Submit
from tests.hang_guard import HANG_S, until


def command(key: int, form: str) -> Submit:
    return Submit(key, str(key), b"", {"structured_outputs": {"regex": form}}, 0, None)


class Gates:
    """Builds requests: requests of a shut form wait until it is opened."""

    def __init__(self) -> None:
        self.shut: dict[str, threading.Event] = {}
        self.begun: list[int] = []
        self.done: list[tuple[int, Any]] = []

    def build(self, command: Submit) -> Any:
        self.begun.append(command.key)
        form = command.params["structured_outputs"]["regex"]
        if form in self.shut:
            assert self.shut[form].wait(HANG_S)
        if form == "refused":
            raise RequestError("it is refused")
        if form == "broken":
            raise ValueError("a mistake of ours")
        return f"built {command.key}"

    def take(self, command: Submit, built: Any) -> None:
        self.done.append((command.key, built))

    @property
    def done_keys(self) -> list[int]:
        return [key for key, _ in self.done]


@pytest.fixture
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    for event in gates.shut.values():
        event.set()


@pytest.fixture
def queue_of(gates: Gates) -> Iterator[Callable[..., FormQueue]]:
    queues: list[FormQueue] = []

    def make(**options: Any) -> FormQueue:
        queues.append(FormQueue(gates.build, gates.take, **options))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()


def test_requests_of_one_form_come_in_their_order_and_do_not_keep_the_others(gates, queue_of):
    gates.shut["slow"] = threading.Event()
    queue = queue_of()
    for key in range(20):
        queue.add(command(key, "slow"))
    for key in range(20, 25):
        queue.add(command(key, "quick"))
    until(lambda: len(gates.done) == 5, "the quick ones are built")
    assert gates.done_keys == list(range(20, 25))
    assert sorted(gates.begun) == [0, *range(20, 25)], "one thread alone has the slow form"
    gates.shut["slow"].set()
    until(lambda: len(gates.done) == 25, "all are built")
    assert gates.done_keys[5:] == list(range(20))
    assert dict(gates.done)[3] == "built 3"


def test_a_request_that_is_dropped_is_not_told_whether_it_waits_or_compiles(gates, queue_of):
    gates.shut["slow"] = threading.Event()
    queue = queue_of()
    for key in range(3):
        queue.add(command(key, "slow"))
    until(lambda: gates.begun == [0], "the first compiles")
    assert queue.drop(0)
    assert queue.drop(1)
    assert not queue.drop(1)
    gates.shut["slow"].set()
    until(lambda: gates.done_keys == [2], "the last is built")
    assert gates.begun == [0, 2]
    assert not queue.drop(2)


def test_a_full_queue_refuses_and_has_room_again_after(gates, queue_of):
    gates.shut["slow"] = threading.Event()
    queue = queue_of(most=2)
    queue.add(command(0, "slow"))
    queue.add(command(1, "slow"))
    with pytest.raises(TooManyFormsError, match="2 requests wait until the form"):
        queue.add(command(2, "quick"))
    queue.drop(1)
    queue.add(command(3, "quick"))
    until(lambda: gates.done_keys == [3], "the one that fitted is built")


def test_what_fails_is_told_and_the_next_is_built(gates, queue_of):
    queue = queue_of()
    for key, form in enumerate(["refused", "broken", "refused", "broken", "broken", "broken", "broken", "good"]):
        queue.add(command(key, form))
    until(lambda: len(gates.done) == 8, "all are told")
    told = dict(gates.done)
    assert isinstance(told[0], RequestError)
    assert isinstance(told[1], MllmError)
    assert str(told[1]) == "internal error at the form of the answer; the server's log has it"
    assert told[7] == "built 7"


def test_nothing_is_told_after_the_end(gates, queue_of):
    gates.shut["slow"] = threading.Event()
    queue = queue_of()
    queue.add(command(0, "slow"))
    until(lambda: gates.begun == [0], "it compiles")
    queue.close()
    gates.shut["slow"].set()
    threads = [thread for thread in threading.enumerate() if thread.name == "mllm-forms"]
    for thread in threads:
        thread.join(HANG_S)
    assert gates.done == []
