"""The compiler process: imports Inductor once, then compiles each piece in a fork of itself.

A compile's imports take seconds of a core. A dense model has 16 pieces and variants. If each had a process that imports
Inductor itself, they would take the cores from the trace that runs meanwhile, and from each other.

One JSON request a line comes in, one answer a job goes out; nothing is pickled. This process itself never touches the
GPU, as CUDA does not survive a fork, and has no threads. A fork that dies costs its own job alone. Where pieces run on
a GPU the first forks start before there are jobs, as each has to make a context, which took 16 of them at once 1.4 s.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import selectors
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

_NICENESS = 5  # the process that waits for the pieces traces the model meanwhile, and goes first
_MAX_MESSAGE = 4096  # bytes of an error; a pipe holds them until they are read
_CHUNK = 1 << 16

CompileRequest = dict[str, Any]


@dataclass(frozen=True)
class _Fork:
    """A process for one job, which it reads as a line. `answer` is the end of a pipe: the job's error, nothing where
    all went well; then the end."""

    pid: int
    request: int
    answer: int
    log: IO[bytes]

    def give(self, request: CompileRequest) -> None:
        """Gives the fork its job."""
        with contextlib.suppress(BrokenPipeError), os.fdopen(self.request, "w") as pipe:  # it has ended, and says why
            print(json.dumps(request), file=pipe, flush=True)

    def result(self, job: int) -> dict[str, Any]:
        """The answer to the job; waits for the process, which has closed its end of the pipe."""
        message = os.read(self.answer, _MAX_MESSAGE).decode(errors="replace")
        os.close(self.answer)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with self.log:
            if code != 0:
                end = self.log.seek(0, os.SEEK_END)
                self.log.seek(max(0, end - _MAX_MESSAGE))
                last_lines = " | ".join(self.log.read().decode(errors="replace").strip().splitlines()[-3:])
                message = f"the process that compiled it ended (exit code {code}): {last_lines}"
        return {"job": job} | ({"error": message} if message else {})


@dataclass(frozen=True)
class Work:
    """The work of forks.

    Attributes:
        run: does a request; an exception is the job's error.
        get_ready: runs before a fork has its job.
        waiting: so many forks get ready before there are jobs.
    """

    run: Callable[[CompileRequest], None]
    get_ready: Callable[[], None] = lambda: None
    waiting: int = 0


def serve(requests: int, answers: IO[str], work: Work) -> None:
    """Runs every request in a fork until `requests`, a file descriptor, ends; then ends its process group."""
    try:
        _serve(requests, answers, work)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os.killpg(0, signal.SIGKILL)  # no reader is left for what the forks make


def _serve(requests: int, answers: IO[str], work: Work) -> None:
    pending = b""
    waiting: list[_Fork] = []
    with contextlib.suppress(OSError):  # without them a job's fork starts when the job is there
        for _ in range(work.waiting):
            waiting.append(_start(work, answers, waiting))
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fileobj)
                    fork, job = key.data
                    print(json.dumps(fork.result(job)), file=answers, flush=True)
                    continue
                chunk = os.read(requests, _CHUNK)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for request in map(json.loads, lines):
                    try:
                        fork = waiting.pop(0) if waiting else _start(work, answers, waiting)
                    except OSError as error:  # of memory, processes or files there are no more
                        refusal = {"job": request["job"], "error": f"no process can be started for it ({error})"}
                        print(json.dumps(refusal), file=answers, flush=True)
                    else:
                        fork.give(request)
                        selector.register(fork.answer, selectors.EVENT_READ, (fork, request["job"]))


def _start(work: Work, answers: IO[str], waiting: Sequence[_Fork]) -> _Fork:
    with contextlib.ExitStack() as if_refused:
        log = if_refused.enter_context(tempfile.TemporaryFile())

        def pipe() -> tuple[int, int]:
            ends = os.pipe()
            for end in ends:
                if_refused.callback(os.close, end)
            return ends

        job, request = pipe()
        answer, told = pipe()
        pid = os.fork()
        if pid == 0:
            # These end with the compiler process: its answers, and the pipes that this fork and others wait for.
            for end in (answers.fileno(), request, *(fork.request for fork in waiting)):
                os.close(end)
            os.dup2(job, 0)
            _work(work, log.fileno(), told)
        if_refused.pop_all()
    os.close(job)
    os.close(told)
    return _Fork(pid, request, answer, log)


def _work(work: Work, log: int, answer: int) -> NoReturn:
    """Does the fork's side. Its standard input is its job's line, its output is the job's log."""
    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        work.get_ready()
        with open(0, closefd=False) as job:
            request = job.readline()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if request:  # empty: the parent has ended
            work.run(json.loads(request))
        code = 0
    except BaseException as error:
        os.write(answer, _describe(error).encode()[:_MAX_MESSAGE])
        code = 0
    finally:
        os._exit(code)  # without what the parent process has registered to be done at its own exit


def _describe(error: BaseException) -> str:
    traceback.print_exc()
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{message}{_what_was_said(error)} ({Path(frame.filename).name}, line {frame.lineno})"


def _what_was_said(error: BaseException) -> str:
    """The error of a failed program, such as g++: its first line that names an error, or the last one of ld's.

    Inductor's CppCompileError has it behind a headline, also where it is another error's text.
    """
    output = str(error).partition("\nOutput:\n")[2]
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("collect2:")]
    named = [line for line in lines if re.search(r"\berror:", line)] or lines[-1:]
    return f": {named[0]}" if named else ""


def _compile(scratch: Path, request: CompileRequest) -> None:
    from mllm_compile.inductor.compile_piece import compile_piece, prepare_device
    from mllm_compile.inductor.job import PieceInput

    if request.get("prepare"):
        prepare_device(request["device"])
        return
    compile_piece(
        Path(request["source"]),
        [PieceInput.from_json(spec) for spec in request["inputs"]],
        request["device"],
        request["max_sizes"],
        Path(request["package"]),
        scratch,
    )


def main(device: str, scratch: Path, waiting: int) -> None:
    # Whatever Inductor or a compiler prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.nice(_NICENESS)
    from mllm_compile.process.bytecode import kept_bytecode
    from mllm_compile.process.no_gc import gc_paused

    with kept_bytecode(), gc_paused():
        from mllm_compile.inductor.compile_piece import enter_device, prepare_compiler

        prepare_compiler(device, scratch)
        gc.freeze()  # forks share unwritten memory, and the collector writes to it
    serve(0, answers, Work(partial(_compile, scratch), partial(enter_device, device), waiting))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
