"""A helper's output stops nothing, and what it does ends in wall time too."""

from __future__ import annotations

import pytest

from mllm_compile.process.helper_process import HelperProcesses, NoAnswer
from mllm_compile.process.helper_server import FRAME, REQUEST
from tests.hang_guard import HANG_S, until


def processes(start: str = "", *, max_wait_s: float = HANG_S, max_start_s: float = HANG_S, most: int = 1):
    return HelperProcesses(
        "tests.process.helper",
        start.encode(),
        task="that does what a test names",
        seconds=1000,
        max_wait_s=max_wait_s,
        max_start_s=max_start_s,
        max_answer=1000,
        most=most,
        kept_after=(b"A",),
    )


@pytest.mark.parametrize("start", ["", "talk"])
def test_what_a_helper_writes_to_standard_error_does_not_stop_it(start):
    helpers = processes(start)
    for request in (b"talk", b"talk talk", b"close", b""):
        assert helpers.ask(request) == (b"A", request)


def test_the_last_line_is_told_after_much_output_too():
    with pytest.raises(NoAnswer, match=r"its process ended \(exit code 3\): my last words") as error:
        processes().ask(b"talk die")
    assert not error.value.is_limit


def test_a_helper_that_sleeps_is_ended_and_the_next_request_is_served():
    helpers = processes(max_wait_s=0.2)
    with pytest.raises(NoAnswer, match=r"was not over after 0\.2 s") as error:
        helpers.ask(b"sleep")
    assert error.value.is_limit
    helpers._max_wait_s = HANG_S
    assert helpers.ask(b"talk") == (b"A", b"talk")


def test_a_helper_that_does_not_get_ready_is_ended():
    with pytest.raises(NoAnswer, match=r"its process was not ready within 0\.2 s") as error:
        processes("sleep", max_start_s=0.2).ask(b"")
    assert not error.value.is_limit


def test_a_helper_that_answers_with_too_much_is_ended(monkeypatch):
    monkeypatch.setattr("mllm_compile.process.helper_process._END_S", 0.1)
    with pytest.raises(NoAnswer, match="its process ended"):
        processes().ask(b"boast")


def test_what_arrives_while_a_helper_works_does_not_end_it():
    """The kernel may tell of a request's arrival when the request is read already."""
    helpers = processes()
    assert helpers.ask(b"") == (b"A", b"")
    (process,) = helpers._processes
    process._socket.settimeout(HANG_S)
    more, talk = (FRAME.pack(REQUEST, 4) + word for word in (b"more", b"talk"))
    process._socket.sendall(more)
    until(lambda: process._hear() and b"working" in process._said)
    process._socket.sendall(talk)
    with process._socket.makefile("rb") as answers:
        assert answers.read(len(more)).endswith(b"more")
    assert process.is_alive
