"""The compiler process and its forks: what they keep is private, and what goes wrong is told with the piece's name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mllm_compile.errors import CompileError, ConfigError
from mllm_compile.piece_compiler import PieceInput
from mllm_compile.piece_workers import PieceJob, PieceWorkers

SIZES = {"T": 8192, "S": 8192}


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "compilers").mkdir()
    (tmp_path / "compilers").chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others; what compilers keep there is executed"):
        PieceWorkers("cpu", SIZES, tmp_path / "compilers", count=1)


def test_a_link_to_a_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "compilers").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"Remove it, or set cache\.dir to a folder of your own"):
        PieceWorkers("cpu", SIZES, tmp_path / "compilers", count=1)


@pytest.mark.slow  # what every first compile on a machine needs: ten seconds of test programs
def test_an_error_in_a_piece_names_it_and_the_next_one_is_compiled_on(tmp_path):
    source = tmp_path / "piece_x.py"
    source.write_text(
        "import torch\nclass Piece(torch.nn.Module):\n    def forward(self, x):\n        return x.no_such()\n"
    )
    job = PieceJob("piece_x", source, (PieceInput(("T",), (1,), "float32"),), Path(tmp_path / "x.pt2"))
    with PieceWorkers("cpu", SIZES, tmp_path / "compilers", count=1) as workers:
        assert (tmp_path / "compilers").stat().st_mode & 0o777 == 0o700
        for _ in range(2):
            with pytest.raises(CompileError, match=r"piece piece_x does not compile: .*no_such"):
                workers.submit(job).result()


def job_of(folder: Path, name: str) -> PieceJob:
    return PieceJob(name, folder / f"{name}.py", (), folder / f"{name}.pt2")


def test_leaving_ends_what_runs_and_what_waits(tmp_path):
    with PieceWorkers("cpu", SIZES, tmp_path / "compilers", count=2) as workers:
        futures = [workers.submit(job_of(tmp_path, f"piece_{number}")) for number in range(5)]
    assert all(future.done() for future in futures)
    assert [future.cancelled() for future in futures[2:]] == [True] * 3
    assert not workers._compiler.is_running


def test_when_the_process_has_ended_every_job_says_so(tmp_path):
    with PieceWorkers("cpu", SIZES, tmp_path / "compilers", count=2) as workers:
        asked_before = workers.submit(job_of(tmp_path, "piece_0"))
        workers._compiler.kill()
        for future in (asked_before, workers.submit(job_of(tmp_path, "piece_1"))):
            with pytest.raises(CompileError, match=r"piece_. does not compile: .* process ended \(exit code -9\)"):
                future.result(timeout=10)


# A process whose forks run what a request says. ----------------------------------------------------------------------

SERVER = """
import os, sys
from mllm_compile.compiler_process import serve
serve(0, os.fdopen(os.dup(1), "w"), lambda request: exec(request["code"]))
"""


@pytest.fixture
def server():
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True, process_group=0)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def answers_to(server: subprocess.Popen[str], *codes: str) -> dict[int, str]:
    """The error of each, "" where there was none."""
    for job, code in enumerate(codes):
        print(json.dumps({"job": job, "code": code}), file=server.stdin)
    server.stdin.flush()
    answers = [json.loads(server.stdout.readline()) for _ in codes]
    return {answer["job"]: answer.get("error", "") for answer in answers}


def test_a_fork_that_dies_costs_its_own_job_alone(server):
    codes = [
        "import os; os.write(2, b'out of memory\\n'); os.kill(os.getpid(), 9)",
        "print('a compiler says much', flush=True)",
        "raise ValueError('not so\\nand not that')",
        "raise SystemExit(3)",
    ]
    answers = answers_to(server, *codes)
    assert answers[0] == "the process that compiled it ended (exit code -9): out of memory"
    assert answers[1] == ""
    assert answers[2].startswith("not so (") and "\n" not in answers[2]
    assert answers[3].startswith("3 (")
    assert answers_to(server, "pass") == {0: ""}


FAILS_ONCE = """
forks = [os.fork, lambda: os.stat("/no/such/file")]  # an OSError, as one that there is no room for
os.fork = lambda: forks.pop()() if len(forks) > 1 else forks[0]()
"""


def test_a_machine_without_room_for_a_fork_refuses_the_job_and_goes_on():
    code = SERVER.replace("serve(0", FAILS_ONCE + "serve(0")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, process_group=0) as process:
        assert answers_to(process, "pass")[0].startswith("no process can be started for it (")
        assert answers_to(process, "pass") == {0: ""}


def test_forks_run_side_by_side_and_share_nothing(server, tmp_path):
    waits = f"""
import os, time
open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w").close()
end = time.monotonic() + 10
while len(os.listdir({str(tmp_path)!r})) < 3:
    assert time.monotonic() < end
"""
    assert answers_to(server, waits, waits, waits) == {0: "", 1: "", 2: ""}


def test_forks_end_with_whoever_asked(server, tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    print(json.dumps({"job": 0, "code": code}), file=server.stdin, flush=True)
    deadline = time.monotonic() + 10
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.stdin.close()
    assert server.wait(10) == -signal.SIGKILL
    while is_running(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.stdin = None  # communicate() would write to it


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
