"""Compiles distinct pieces side by side, each worker its own process that speaks JSON lines.

Workers are started before tracing, so that importing Inductor (seconds) overlaps with it. What crosses the pipe is JSON
naming files; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from mllm_compile.errors import CompileError, ConfigError
from mllm_compile.piece_compiler import PieceInput

_MAX_WORKERS = 16  # as many as a dense model has pieces and forms of them
_END_S = 5.0  # between a process's last word and its end


@dataclass(frozen=True)
class PieceJob:
    """One piece to compile: its source, its inputs, and where the package goes."""

    piece: str
    source_path: Path
    inputs: tuple[PieceInput, ...]
    package_path: Path


class PieceWorkers:
    """A pool of compiler processes; a context manager that ends them."""

    def __init__(self, device: str, max_sizes: dict[str, int], cache: Path, count: int | None = None) -> None:
        """
        Args:
            device: what is compiled for.
            max_sizes: the largest of each dynamic size, by its name in piece_compiler.EXAMPLE_SIZES.
            cache: a folder for what Inductor and Triton keep between compiles; it becomes this user's alone.
            count: of processes; None: by the number of CPU cores.

        Raises:
            ConfigError: `cache` belongs to another user, or others can write to it.
        """
        self._device, self._max_sizes = device, max_sizes
        _make_private(cache)
        self._workers = [_Worker(device, cache) for _ in range(count or min(_MAX_WORKERS, os.cpu_count() or 1))]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="pieces")

    def submit(self, job: PieceJob) -> Future[None]:
        """Compiles a job in the background; jobs are begun in the order in which they come.

        Returns:
            Ends with a CompileError where the piece does not compile: the piece's name and the first line of the
            compiler's error.
        """
        return self._threads.submit(self._run, job)

    def _run(self, job: PieceJob) -> None:
        worker = self._idle.get()
        try:
            worker.compile(job, self._device, self._max_sizes)
        finally:
            # A process that has ended gets no more jobs while there is another one.
            if worker.is_running or not any(other.is_running for other in self._workers):
                self._idle.put(worker)

    def __enter__(self) -> PieceWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown()  # a job that was running has failed
        for worker in self._workers:
            worker.close()


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{folder} belongs to another user or can be written by others; what compilers keep there is executed. "
            "Remove it, or set cache.dir to a folder of your own."
        )


class _Worker:
    def __init__(self, device: str, cache: Path) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close
        environment = os.environ | {
            "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1"),
            # By default Inductor keeps code that it loads again under a name in /tmp that anybody can guess.
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            # Its cache of graphs is made of pickles; every piece here is compiled once anyway.
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mllm_compile.piece_workers", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._lock = threading.Lock()

    def compile(self, job: PieceJob, device: str, max_sizes: dict[str, int]) -> None:
        request = {
            "source": str(job.source_path),
            "inputs": [spec.to_json() for spec in job.inputs],
            "device": device,
            "max_sizes": max_sizes,
            "package": str(job.package_path),
        }
        with self._lock:
            answer = self._ask(json.dumps(request))
        if answer.get("error"):
            raise CompileError(f"piece {job.piece} does not compile: {answer['error']} (its source: {job.source_path})")

    def _ask(self, line: str) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        try:
            print(line, file=stdin, flush=True)
            answer = stdout.readline() if stdout else ""
        except (BrokenPipeError, OSError):
            answer = ""
        if answer:
            return json.loads(answer)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._log.seek(0)
        last_lines = " | ".join(self._log.read().strip().splitlines()[-3:])
        return {"error": f"the compiler process ended (exit code {self._process.poll()}): {last_lines}"}

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process, which holds nothing that anybody needs; an interpreter with Inductor takes a second to end
        by itself."""
        self._process.kill()

    def close(self) -> None:
        """Waits for its end."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()


def _serve(device: str, requests: IO[str], answers: IO[str]) -> None:
    """The worker's side: one JSON request a line, one answer each, until the pipe closes."""
    from mllm_compile.piece_compiler import compile_piece, prepare_compiler

    prepare_compiler(device)
    for line in requests:
        request = json.loads(line)
        try:
            compile_piece(
                Path(request["source"]),
                [PieceInput.from_json(spec) for spec in request["inputs"]],
                request["device"],
                request["max_sizes"],
                Path(request["package"]),
            )
            answer = {}
        except Exception as error:
            import traceback

            traceback.print_exc()
            message = (str(error).strip().splitlines() or [type(error).__name__])[0]
            frame = traceback.extract_tb(error.__traceback__)[-1]
            answer = {"error": f"{message} ({Path(frame.filename).name}, line {frame.lineno})"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # Whatever Inductor or a compiler prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.argv[1], sys.stdin, answers)
