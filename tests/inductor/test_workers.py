"""The compiler process and its forks: their files are private, and errors name the piece."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from mllm_compile.errors import CompileError, ConfigError
from mllm_compile.inductor import workers as piece_workers
from mllm_compile.inductor.job import PieceInput, PieceJob
from mllm_compile.inductor.workers import PieceWorkers
from mllm_compile.process import cpp_compiler
from tests.hang_guard import HANG_S, until

SIZES = {"T": 8192, "S": 8192}


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "compilers").mkdir()
    (tmp_path / "compilers").chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others; what compilers keep there is executed"):
        PieceWorkers("cpu", SIZES, tmp_path / "compilers", tmp_path, count=1)


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "compilers").write_text("x")
    with pytest.raises(ConfigError, match=r"is no folder, .*Remove it, or set cache\.dir to a folder of your own"):
        PieceWorkers("cpu", SIZES, tmp_path / "compilers", tmp_path, count=1)


def test_a_link_to_a_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "compilers").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"Remove it, or set cache\.dir to a folder of your own"):
        PieceWorkers("cpu", SIZES, tmp_path / "compilers", tmp_path, count=1)


def test_a_folder_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=rf"cache\.dir {tmp_path} cannot be written \(Permission denied\)"):
        PieceWorkers("cpu", SIZES, tmp_path / "compilers", tmp_path, count=1)


def test_without_a_compiler_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(cpp_compiler, "SYSTEM_CXX", str(tmp_path / "g++"))
    monkeypatch.setattr(piece_workers, "_CompilerProcess", lambda *args: pytest.fail("a process was started"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match=r"no C\+\+ compiler here: neither .* nor no-such-compiler"):
        PieceWorkers("cpu", SIZES, tmp_path / "compilers", tmp_path, count=1)
    assert not (tmp_path / "compilers").exists()


def test_a_compiler_may_be_named_with_its_options(tmp_path, monkeypatch):
    monkeypatch.setattr(cpp_compiler, "SYSTEM_CXX", str(tmp_path / "g++"))
    started = []
    monkeypatch.setattr(piece_workers, "_CompilerProcess", lambda *args: started.append(args))
    monkeypatch.setenv("CXX", f"{sys.executable} -O1")
    PieceWorkers("cpu", SIZES, tmp_path / "compilers", tmp_path, count=1)
    assert started


@pytest.mark.slow  # what every first compile on a machine needs: ten seconds of test programs
def test_an_error_in_a_piece_names_it_and_the_next_one_is_compiled_on(tmp_path):
    source = tmp_path / "piece_x.py"
    source.write_text(
        "import torch\nclass Piece(torch.nn.Module):\n    def forward(self, x):\n        return x.no_such()\n"
    )
    job = PieceJob("piece_x", source, (PieceInput(("T",), (1,), "float32"),), Path(tmp_path / "x.pt2"))
    with PieceWorkers("cpu", SIZES, tmp_path / "compilers", tmp_path, count=1) as workers:
        assert (tmp_path / "compilers").stat().st_mode & 0o777 == 0o700
        for _ in range(2):
            with pytest.raises(CompileError, match=r"piece piece_x does not compile: .*no_such"):
                workers.submit(job).result()


TELLS_ITS_TEMPORARY_FOLDER = """
import json, sys, tempfile
for line in sys.stdin:
    print(json.dumps({"job": json.loads(line)["job"], "error": tempfile.gettempdir()}), flush=True)
"""


def test_compilers_write_their_temporary_files_where_a_killed_compile_is_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(piece_workers, "_COMMAND", (sys.executable, "-c", TELLS_ITS_TEMPORARY_FOLDER))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with (
        PieceWorkers("cpu", SIZES, tmp_path / "compilers", scratch, count=1) as workers,
        pytest.raises(CompileError, match=rf"does not compile: {scratch} "),
    ):
        workers.submit(job_of(scratch, "piece_0")).result()


def job_of(folder: Path, name: str) -> PieceJob:
    return PieceJob(name, folder / f"{name}.py", (), folder / f"{name}.pt2")


def test_leaving_ends_running_and_waiting_jobs(tmp_path):
    with PieceWorkers("cpu", SIZES, tmp_path / "compilers", tmp_path, count=2) as workers:
        futures = [workers.submit(job_of(tmp_path, f"piece_{number}")) for number in range(5)]
    assert all(future.done() for future in futures)
    assert [future.cancelled() for future in futures[2:]] == [True] * 3
    assert not workers._compiler.is_running


def test_when_the_process_has_ended_every_job_says_so(tmp_path):
    (tmp_path / "piece_0.py").write_text("# its source")
    with PieceWorkers("cpu", SIZES, tmp_path / "compilers", tmp_path, count=2) as workers:
        asked_before = workers.submit(job_of(tmp_path, "piece_0"))
        workers._compiler.kill()
        for future in (asked_before, workers.submit(job_of(tmp_path, "piece_1"))):
            with pytest.raises(CompileError, match=r"piece_. does not compile: .* process ended \(exit code -9\)"):
                future.result(timeout=HANG_S)
        with pytest.raises(CompileError, match=r"its source: .*/compilers/failed/piece_0\.py\)"):
            asked_before.result()
    assert (tmp_path / "compilers" / "failed" / "piece_0.py").read_text() == "# its source"


# A process whose forks run what a request says. ----------------------------------------------------------------------

SERVER = """
import os, sys
from mllm_compile.inductor.server import Work, serve
serve(0, os.fdopen(os.dup(1), "w"), Work(lambda request: exec(request["code"])))
"""


def start_server(code: str = SERVER) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, process_group=0)


@pytest.fixture
def server():
    process = start_server()
    yield process
    kill_group(process)


def kill_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(BrokenPipeError):
        process.communicate()


def answers_to(server: subprocess.Popen[str], *codes: str) -> dict[int, str]:
    """The error of each, "" where there was none."""
    for job, code in enumerate(codes):
        print(json.dumps({"job": job, "code": code}), file=server.stdin)
    server.stdin.flush()
    watchdog = threading.Timer(HANG_S, server.kill)
    watchdog.start()
    lines = [server.stdout.readline() for _ in codes]
    watchdog.cancel()
    assert all(lines), f"{lines.count('')} of {len(codes)} jobs were never answered"
    answers = [json.loads(line) for line in lines]
    return {answer["job"]: answer.get("error", "") for answer in answers}


def test_a_fork_that_dies_costs_its_own_job_alone(server):
    codes = [
        "import os; os.write(2, b'x' * 100000 + b'out of memory\\n'); os.kill(os.getpid(), 9)",
        "print('a compiler says much', flush=True)",
        "raise ValueError('not so\\nand not that')",
        "raise SystemExit(3)",
    ]
    answers = answers_to(server, *codes)
    assert answers[0].startswith("the process that compiled it ended (exit code -9): xxx")
    assert answers[0].endswith("xout of memory") and len(answers[0]) < 5000
    assert answers[1] == ""
    assert answers[2].startswith("not so (") and "\n" not in answers[2]
    assert answers[3].startswith("3 (")
    assert answers_to(server, "pass") == {0: ""}


def test_an_error_that_cannot_be_told_is_no_success(server):
    silent = "class Silent(Exception):\n  def __str__(self): raise OSError\nraise Silent"
    (error,) = answers_to(server, silent).values()
    assert "ended (exit code 1)" in error


def test_a_fork_cannot_take_the_requests_of_others(server):
    assert answers_to(server, "import sys; assert sys.stdin.read() == ''", "pass") == {0: "", 1: ""}


FAILS_OFTEN = """
forks, left = os.fork, [20]
def refuse():
    left[0] -= 1
    os.stat("/no/such/file")  # an OSError, as one that there is no room for
os.fork = lambda: refuse() if left[0] else forks()
"""


def test_a_machine_without_room_for_a_fork_refuses_the_job_and_goes_on():
    process = start_server(SERVER.replace("serve(0", FAILS_OFTEN + "serve(0"))
    refused = answers_to(process, *["pass"] * 20)
    assert {error.split(" (")[0] for error in refused.values()} == {"no process can be started for it"}
    assert answers_to(process, "import os; assert len(os.listdir('/proc/self/fd')) < 15") == {0: ""}
    kill_group(process)


def test_forks_run_side_by_side(server, tmp_path):
    waits = f"""
import os, time
open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w").close()
end = time.monotonic() + {HANG_S}
while len(os.listdir({str(tmp_path)!r})) < 3:
    assert time.monotonic() < end
"""
    assert answers_to(server, waits, waits, waits) == {0: "", 1: "", 2: ""}


def test_what_a_compiler_said_is_in_the_error(server):
    code = """
from torch._inductor.exc import CppCompileError
output = ["In file x.cpp:", "x.cpp:3: warning: odd", "x.cpp:7:1: error: no such thing", "more"]
raise CppCompileError(["g++", "x.cpp"], chr(10).join(output))
"""
    links = """
from torch._inductor.exc import CppCompileError
output = ["ld: final link failed: No space left on device", "collect2: error: ld returned 1 exit status"]
raise CppCompileError(["g++"], chr(10).join(output))
"""
    told = answers_to(server, code, "raise ValueError('plain')", links)
    assert told[0].startswith("C++ compile error: x.cpp:7:1: error: no such thing (")
    assert told[1].startswith("plain (")
    assert told[2].startswith("C++ compile error: ld: final link failed: No space left on device (")


WAITING = """
import os, sys
from mllm_compile.inductor.server import Work, serve
def get_ready():
    open(f"FOLDER/{os.getpid()}", "w").close()
    GET_READY
serve(0, os.fdopen(os.dup(1), "w"), Work(lambda request: exec(request["code"]), get_ready, 2))
"""


def test_forks_that_wait_take_the_first_jobs_and_others_start_then(tmp_path):
    process = start_server(WAITING.replace("FOLDER", str(tmp_path)).replace("GET_READY", "pass"))
    try:
        waiting = running_forks(tmp_path, 2)
        tells = "import os; raise ValueError(os.getpid())"
        answers = answers_to(process, tells, tells, tells)
        took = [int(error.split()[0]) for error in answers.values()]
        assert set(waiting) < set(took) and len(set(took)) == 3
        assert len(running_forks(tmp_path, 3)) == 3, "who starts late gets ready too"
    finally:
        kill_group(process)


@pytest.mark.parametrize(
    ("get_ready", "error"), [("raise ValueError('no GPU')", "no GPU"), ("os._exit(3)", r"exit code 3")]
)
def test_a_fork_that_fails_while_it_waits_is_its_jobs_error(tmp_path, get_ready, error):
    process = start_server(WAITING.replace("FOLDER", str(tmp_path)).replace("GET_READY", get_ready))
    try:
        assert_gone(running_forks(tmp_path, 2))
        answers = answers_to(process, "pass", "pass")
        assert all(error in told for told in answers.values())
    finally:
        kill_group(process)


def test_forks_that_wait_end_with_the_process_that_is_killed_alone(tmp_path):
    process = start_server(WAITING.replace("FOLDER", str(tmp_path)).replace("GET_READY", "pass"))
    waiting = running_forks(tmp_path, 2)
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert_gone(waiting)
    finally:
        kill_group(process)


def test_what_is_forked_has_not_touched_the_gpu_and_has_no_threads(tmp_path):
    code = """
import os, sys, torch
def touched(*args, **kwargs):
    raise AssertionError("CUDA does not survive a fork")
for name in ("is_available", "device_count", "current_device", "get_device_capability", "_lazy_init"):
    setattr(torch.cuda, name, touched)
from pathlib import Path
from mllm_compile.inductor.compile_piece import prepare_compiler
prepare_compiler("cuda:0", Path(sys.argv[1]))
assert os.listdir("/proc/self/task") == [str(os.getpid())], "threads do not survive a fork either"
"""
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # as piece_workers sets it
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)


# Remains of ended processes. ------------------------------------------------------------------------------------

SLEEPS = "import os, time; open({folder!r} + f'/{{os.getpid()}}', 'w').close(); time.sleep(3600)"


def running_forks(folder: Path, count: int) -> list[int]:
    """The processes that have begun to sleep, once they are so many."""
    until(lambda: len(os.listdir(folder)) >= count, f"{count} forks run")
    return [int(name) for name in os.listdir(folder)]


def assert_gone(pids: list[int]) -> None:
    until(lambda: not any(map(is_running, pids)), "the forks' end")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_forks_end_with_whoever_asked(server, tmp_path):
    print(json.dumps({"job": 0, "code": SLEEPS.format(folder=str(tmp_path))}), file=server.stdin, flush=True)
    forks = running_forks(tmp_path, 1)
    server.stdin.close()
    assert server.wait(HANG_S) == -signal.SIGKILL
    assert_gone(forks)
    server.stdin = None  # communicate() would write to it


def test_forks_end_when_answers_cannot_be_told_any_more(server, tmp_path):
    (tmp_path / "forks").mkdir()
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'gate')!r}): time.sleep(0.01)"
    for job, code in enumerate((SLEEPS.format(folder=str(tmp_path / "forks")), waits)):
        print(json.dumps({"job": job, "code": code}), file=server.stdin, flush=True)
    forks = running_forks(tmp_path / "forks", 1)
    server.stdout.close()
    (tmp_path / "gate").touch()
    assert server.wait(HANG_S) == -signal.SIGKILL
    assert_gone(forks)


@pytest.mark.parametrize("is_killed", [False, True])
def test_leaving_ends_the_forks_also_when_the_process_was_killed_alone(tmp_path, monkeypatch, is_killed):
    (tmp_path / "pids").mkdir()
    sleeping = SERVER.replace('request["code"]', repr(SLEEPS.format(folder=str(tmp_path / "pids"))))
    monkeypatch.setattr(piece_workers, "_COMMAND", (sys.executable, "-c", sleeping))
    with PieceWorkers("cpu", SIZES, tmp_path / "compilers", tmp_path, count=2) as workers:
        future = workers.submit(job_of(tmp_path, "piece_0"))
        forks = running_forks(tmp_path / "pids", 2)  # what prepares the device, and the job
        if is_killed:
            workers._compiler._process.kill()
            with pytest.raises(CompileError, match=r"process ended \(exit code -9\)"):
                future.result(timeout=HANG_S)
    assert future.done()
    assert_gone(forks)
