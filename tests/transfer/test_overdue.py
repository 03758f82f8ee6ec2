"""A deadline that passes is seen by another thread; a thing that has come has none."""

from __future__ import annotations

import threading

from mllm_compile.transfer.overdue import Overdue
from tests.hang_guard import HANG_S, until


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "late"]


def test_the_first_deadline_that_passes_ends_it_once():
    ends, ended = list[threading.Thread](), threading.Event()

    def end() -> None:
        ends.append(threading.current_thread())
        overdue.stop()
        ended.set()

    overdue = Overdue(end, "late")
    overdue.expect(0)
    assert ended.wait(HANG_S)
    until(lambda: not watchers(), "its thread ends")
    assert [one.name for one in ends] == ["late"]
    overdue.came()  # of what was ended


def test_what_has_come_is_not_late_and_stopping_ends_the_thread():
    ended = threading.Event()
    overdue = Overdue(ended.set, "late")
    for _ in range(3):
        overdue.expect(3600)
        overdue.came()
    overdue.stop()
    until(lambda: not watchers(), "its thread ends")
    overdue.expect(3600)  # and begins anew
    assert len(watchers()) == 1
    overdue.stop()
    until(lambda: not watchers(), "its thread ends")
    assert not ended.is_set()


def test_a_shorter_deadline_behind_a_longer_one_that_came_is_seen():
    ended = threading.Event()
    overdue = Overdue(ended.set, "late")
    overdue.expect(3600)  # as joining a group
    until(lambda: overdue._looks_at > 0, "its thread waits")
    overdue.expect(0.05)  # as a broadcast
    overdue.came()
    assert ended.wait(HANG_S)
    overdue.stop()
    until(lambda: not watchers(), "its thread ends")
