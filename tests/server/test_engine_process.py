"""The first engine's process, which is started ahead of its server: nobody else's, and never left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import pytest

from mllm_compile.process.group import ProcessGroup
from mllm_compile.server import engine_process
from mllm_compile.server.engine_process import early_engine
from mllm_compile.server.options import ServeOptions
from tests.server.harness import eventually, fake_server

OPTIONS = ServeOptions(model="fake")
WAITS = [sys.executable, "-c", "import sys; sys.stdin.read(); import time; time.sleep(600)"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ProcessGroup]:
    """The processes that begin; each does nothing."""
    found: list[ProcessGroup] = []

    def start(command: list[str], **options: object) -> ProcessGroup:
        found.append(ProcessGroup(command, **options))
        return found[-1]

    monkeypatch.setattr(engine_process, "command_line", lambda options: lambda descriptor: WAITS)
    monkeypatch.setattr(engine_process, "ProcessGroup", start)
    return found


def test_a_process_that_no_server_takes_ends_with_what_would_have_needed_it(started):
    with pytest.raises(ValueError, match="the port is taken"), early_engine(OPTIONS):
        assert started[0].poll() is None
        raise ValueError("the port is taken")
    assert started[0].poll() is not None


def test_a_process_that_is_taken_is_the_takers(started):
    with early_engine(OPTIONS) as early:
        process, kept = early.take()
        with pytest.raises(RuntimeError, match="is another's"):
            early.take()
    assert process.process is started[0]
    assert started[0].poll() is None
    assert kept.num_bytes == 0
    process.kill()
    kept.close()


def test_it_may_have_as_many_open_files_as_the_engines_that_follow(started):
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, most), most))
    try:
        with early_engine(OPTIONS):
            assert resource.prlimit(started[0].pid, resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_starting_it_imports_nothing_of_a_server():
    code = (
        "import mllm_compile.server.engine_process, sys;"
        "found = {'torch', 'uvicorn', 'uvloop', 'starlette', 'msgspec', 'asyncio'} & set(sys.modules);"
        "sys.exit(', '.join(found) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_server_takes_the_process_that_was_started_early_and_starts_the_next_one_itself():
    with fake_server(environment={"MLLM_FAKE_EARLY": "1"}) as server:
        assert server.complete().status == 200
        (first,) = server.engine_pids()
        os.kill(first, signal.SIGKILL)
        eventually(lambda: server.figure("mllm:engine_restarts_total") == 1)
        assert server.complete().status == 200, "the next engine's"
        assert first not in server.engine_pids()
        assert server.end() == 0
