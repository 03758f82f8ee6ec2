"""The spare process of a server: what it becomes, when it is there, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.server.kill_speed import children
from mllm_compile.process import child_python
from mllm_compile.process.group import ProcessGroup
from mllm_compile.process.passage import Passage
from mllm_compile.server.backend import spare as spare_process
from mllm_compile.server.backend.spare import ENGINE, WAITS
from mllm_compile.server.kept_memory import KeptMemory
from mllm_compile.server.spare import ENGINE_IMPORTS, Spare
from tests.hang_guard import until
from tests.server.harness import Server, eventually, fake_server
from tests.server.test_ends import is_gone

MODULE = "tests.server.spare_program"


@pytest.fixture
def spare() -> Iterator[Spare]:
    one = Spare([MODULE])
    yield one
    one.close()


def pid_of(spare: Spare) -> int:
    assert spare._process is not None
    return spare._process.pid


def has_ended(spare: Spare) -> bool:
    return spare._process is None or spare._process.poll() is not None


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def program(own: int, kept: int, passing: int) -> tuple[Sequence[str], Mapping[str, str]]:
    return child_python.command(MODULE, str(own), "é ☕"), {
        "MLLM_TEST_KEPT": str(kept),
        "MLLM_TEST_PASSING": str(passing),
    }


def become(spare: Spare) -> tuple[ProcessGroup | None, dict[str, object]]:
    """Takes the process, and hears what it is."""
    ours, its = socket.socketpair()
    kept = KeptMemory()
    passage, its_passage = Passage.pair()
    try:
        os.write(kept.descriptor, b"kept")
        passage.give([os.dup(kept.descriptor)])
        with its, its_passage:
            process = spare.take(program, (its.fileno(), kept.descriptor, its_passage.fileno()))
        told = b"".join(iter(lambda: ours.recv(4096), b"")) if process is not None else b"{}"
    finally:
        ours.close()
        kept.close()
        passage.close()
    return process, json.loads(told)


def test_it_becomes_a_program_with_its_arguments_variables_and_descriptors(spare):
    spare.prepare()
    pid = pid_of(spare)
    until(lambda: name_of(pid) == WAITS)
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n", "the first that a system without memory ends"
    process, told = become(spare)
    assert process is not None and process.pid == pid
    assert told["oom_score"] == Path("/proc/self/oom_score_adj").read_text()
    assert told["arguments"][1:] == ["é ☕"]
    assert (told["kept"], told["name"], told["group"], told["threads"]) == (["kept", "kept"], ENGINE, pid, 1)
    assert told["niceness"] == [os.getpriority(os.PRIO_PROCESS, 0)], "as a new process has it"
    assert len(told["descriptors"]) == 6, "three of each process, two of those that it was given, and the list's own"
    assert process.wait() == 7
    assert spare.take(program, (0, 1, 2)) is None, "it is another's now"


def test_one_that_still_imports_is_not_taken_and_stays(spare, tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    gate.touch()
    monkeypatch.setenv("MLLM_TEST_GATE", str(gate))
    spare.prepare()
    pid = pid_of(spare)
    assert become(spare) == (None, {})
    spare.prepare()
    assert pid_of(spare) == pid
    gate.unlink()
    until(lambda: name_of(pid) == WAITS)
    process, _ = become(spare)
    assert process is not None and process.wait() == 7


def test_one_that_imports_ends_with_its_server(spare, tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    gate.touch()
    monkeypatch.setenv("MLLM_TEST_GATE", str(gate))
    spare.prepare()
    pid = pid_of(spare)
    spare.close()
    assert is_gone(pid)
    spare.close()  # again: nothing is left to end


def test_one_that_was_killed_is_not_taken_and_the_next_one_is(spare):
    spare.prepare()
    killed = pid_of(spare)
    until(lambda: name_of(killed) == WAITS)
    os.kill(killed, signal.SIGKILL)
    until(lambda: has_ended(spare))
    spare.prepare()
    assert pid_of(spare) != killed
    until(lambda: name_of(pid_of(spare)) == WAITS)
    os.kill(pid_of(spare), signal.SIGKILL)
    until(lambda: has_ended(spare))
    process, _ = become(spare)
    assert process is None or process.wait() == -signal.SIGKILL  # it had told that it waits, and has heard nothing
    spare.prepare()
    until(lambda: name_of(pid_of(spare)) == WAITS)
    process, _ = become(spare)
    assert process is not None and process.wait() == 7


def test_imports_that_fail_are_the_engines_to_tell(spare, monkeypatch, capfd):
    monkeypatch.setenv("MLLM_TEST_IMPORT_FAILS", "1")
    spare.prepare()
    assert spare._process is not None and spare._process.wait() == 1
    assert become(spare) == (None, {})
    assert capfd.readouterr().err == ""


def test_one_of_a_server_with_a_lower_priority_keeps_that(tmp_path):
    (tmp_path / "told.py").write_text("import os\nprint(os.getpriority(os.PRIO_PROCESS, 0))")
    environment = child_python.environment()
    environment["PYTHONPATH"] += f":{tmp_path}"
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()  # it ends once it has imported
    with its:
        command = ["nice", "-n", "15", *child_python.command(spare_process.__name__, str(its.fileno()), "told")]
        done = subprocess.run(command, env=environment, pass_fds=[its.fileno()], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 15)


def test_without_room_for_a_process_there_is_none(spare, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("mllm_compile.server.spare.ProcessGroup", refuse)
    spare.prepare()
    assert become(spare) == (None, {})


# --- a server's ------------------------------------------------------------------------------------------------------


def waiting(server: Server) -> int:
    """The spare process, once it waits."""
    found: list[int] = []
    eventually(lambda: found.extend(pid for pid, name in children(server.process.pid) if name == WAITS) or found)
    return found[0]


def engines(server: Server) -> list[int]:
    return [pid for pid, name in children(server.process.pid) if name == ENGINE]


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_engines_that_are_killed_one_after_another_are_followed_by_the_processes_that_were_spare(kills):
    with fake_server(environment={"MLLM_FAKE_SPARE": "1"}) as server:
        spare = waiting(server)
        (engine,) = (pid for pid, _ in children(server.process.pid) if pid != spare)
        for lost in range(1, kills + 1):
            os.kill(engine, signal.SIGKILL)
            eventually(lambda lost=lost: server.figure("mllm:engine_restarts_total") == lost)
            assert server.complete().status == 200, "of the next engine"
            assert engines(server) == [spare]
            if lost < kills:
                engine, spare = spare, waiting(server)
        left = [pid for pid, _ in children(server.process.pid)]  # the next one imports
        assert server.end() == 0
        assert all(map(is_gone, left))
        assert "Traceback" not in server.said


@pytest.mark.slow
def test_with_the_spare_process_killed_an_engine_is_started_anew():
    with fake_server(environment={"MLLM_FAKE_SPARE": "1"}) as server:
        spare = waiting(server)
        os.kill(spare, signal.SIGKILL)
        (engine,) = (pid for pid, _ in children(server.process.pid) if pid != spare)
        os.kill(engine, signal.SIGKILL)
        eventually(lambda: server.figure("mllm:engine_restarts_total") == 1)
        assert server.complete().status == 200
        assert engines(server) == [] and waiting(server) != spare


@pytest.mark.slow
def test_an_engine_that_slept_is_the_process_that_was_spare_which_dies_with_its_server():
    with fake_server({"sleep_after_s": 0.3}, environment={"MLLM_FAKE_SPARE": "1"}) as server:
        spare = waiting(server)
        eventually(lambda: server.get("/ready").json == {"state": "asleep"})
        assert server.complete().status == 200
        following = waiting(server)
        assert following != spare, "it waits no more: the engine was it, and may sleep again"
        server.process.kill()
        eventually(lambda: is_gone(following))


WARM_START = """
import importlib, json, sys
from mllm_compile.server.spare import ENGINE_IMPORTS
for module in ENGINE_IMPORTS:
    importlib.import_module(module)
assert not sys.modules["torch"].cuda.is_initialized()
before = set(sys.modules)
from mllm_compile import Engine
with Engine(sys.argv[1]) as engine:
    engine.generate([[1, 2, 3]])
    print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_an_engine_imports_hardly_anything_that_the_spare_process_has_not(tiny_yaml):
    command = [sys.executable, "-c", WARM_START, str(tiny_yaml)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    later = json.loads(done.stdout.splitlines()[-1])
    others = [name for name in later if not name.startswith("mllm_compile.")]
    assert len(later) < 40 and len(others) < 15, later
    assert len(ENGINE_IMPORTS) < 10, "those that import the others"
