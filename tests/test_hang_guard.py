"""Tests expect nothing to happen within a time: a busy machine would fail them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hang_guard
from tests.hang_guard import until

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "monotonic_ns", "perf_counter_ns", "process_time", "thread_time"}
WAITS = {"wait", "join", "communicate", "result", "alarm", "Timer", "get", "acquire", "run", "wait_for", "urlopen"}
# Code that shows a time without expecting one, kills something at a random moment, or is a slow link.
MAY_READ_CLOCKS = {"hang_guard.py", "fakes.py", "soak.py", "cost.py", "test_compile_killed.py", "fake_front.py"}
MAY_READ_CLOCKS |= {"two_networks.py"}


def limits(tree: ast.AST) -> Iterator[str]:
    """Clocks that are read, and waits that end after a number of seconds that is written there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in CLOCKS:
            yield f"line {node.lineno} reads time.{name}"
        said = [keyword.value for keyword in node.keywords if keyword.arg in ("timeout", "interval", "timeout_s")]
        said += node.args[:1] if name in WAITS - {"run", "get"} else []
        said += node.args[1:2] if name == "wait_for" else []
        if name in WAITS and any(isinstance(one, ast.Constant) and type(one.value) in (int, float) for one in said):
            yield f"line {node.lineno}: {name} ends after a number of seconds; take HANG_S"


def sources() -> list[Path]:
    return sorted(TESTS.rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_no_test_expects_something_within_a_time(path):
    if path.name not in MAY_READ_CLOCKS:
        assert list(limits(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "code",
    [
        "start = time.monotonic()",
        "event.wait(5)",
        "thread.join(timeout=20)",
        "run(command, timeout=40)",
        "alarm(3)",
        "wait_for(answer, 20)",
    ],
)
def test_a_limit_is_seen(code):
    assert len(list(limits(ast.parse(code)))) == 1


@pytest.mark.parametrize("code", ["event.wait(HANG_S)", "thread.join()", "', '.join(names)", "time.time()"])
def test_other_waits_are_not_taken_for_limits(code):
    assert list(limits(ast.parse(code))) == []


def test_what_never_comes_true_is_told(monkeypatch):
    monkeypatch.setattr(hang_guard, "HANG_S", 0.0)
    until(lambda: True)
    with pytest.raises(AssertionError, match="the end has not come true in 0 s"):
        until(lambda: False, "the end")
