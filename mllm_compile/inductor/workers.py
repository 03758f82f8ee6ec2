"""Compiles distinct pieces side by side: jobs for the compiler process, and what became of them.

That process is started before tracing, so that importing Inductor (seconds) overlaps with it. The pipe carries
JSON naming files; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mllm_compile.errors import CompileError
from mllm_compile.files.cache_folders import make_private
from mllm_compile.inductor.job import PieceJob
from mllm_compile.inductor.patches import left_out
from mllm_compile.inductor.toolchain import check_compiler
from mllm_compile.process import bytecode, child_python
from mllm_compile.process.group import ProcessGroup
from mllm_compile.runtime.files.disk_space import full_disk_said

_MAX_WORKERS = 16  # as many as a dense model has pieces and variants of them
_COMMAND = child_python.command("mllm_compile.inductor.server")
_END_S = 5.0  # between a process's last word and its end


class PieceWorkers:
    """Compiles pieces in forks of one process; a context manager that ends them all."""

    def __init__(
        self, device: str, max_sizes: dict[str, int], cache: Path, scratch: Path, count: int | None = None
    ) -> None:
        """
        Args:
            device: the device to compile for.
            max_sizes: the largest of each dynamic size, by its name in job.EXAMPLE_SIZES.
            cache: a folder for what Inductor and Triton keep between compiles; it becomes this user's alone.
            scratch: a folder for what only this compile needs; it outlives the workers.
            count: pieces at a time; None: by the number of CPU cores.

        Raises:
            ConfigError: `cache` cannot be made, is no folder, belongs to another user, or others can write to it; or
                the environment names a patch that is not known.
            CompileError: there is no C++ compiler.
        """
        self._device, self._max_sizes = device, max_sizes
        check_compiler()
        left_out()  # tells of a wrong name here, not in the process that reads it
        make_private(cache)
        self._failed = cache / "failed"
        count = count or min(_MAX_WORKERS, os.cpu_count() or 1)
        self._compiler = _CompilerProcess(device, cache, scratch, count)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="pieces")

    def submit(self, job: PieceJob) -> Future[None]:
        """Compiles a job in the background; jobs are begun in the order in which they come.

        Returns:
            Ends with a CompileError where the piece does not compile: the piece's name and the first line of the
            compiler's error; or with an OSError where a disk is full.
        """
        return self._threads.submit(self._run, job)

    def _run(self, job: PieceJob) -> None:
        answer = self._compiler.ask(
            {
                "source": str(job.source_path),
                "inputs": [spec.to_json() for spec in job.inputs],
                "device": self._device,
                "max_sizes": self._max_sizes,
                "package": str(job.package_path),
            }
        ).result()
        if answer.get("error"):
            written = (job.package_path.parent, self._failed.parent)
            if (full := full_disk_said(answer["error"], written)) is not None:
                raise full
            raise CompileError(f"piece {job.piece} does not compile: {answer['error']} (its source: {self._keep(job)})")

    def _keep(self, job: PieceJob) -> Path:
        """Copies its source to where it outlives the compile."""
        self._failed.mkdir(exist_ok=True)
        return Path(shutil.copy(job.source_path, self._failed)) if job.source_path.exists() else job.source_path

    def __enter__(self) -> PieceWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._compiler.kill()
        self._threads.shutdown()  # a job that was running has failed
        self._compiler.close()


class _CompilerProcess:
    """The outside of inductor/server.py: any number of threads ask it."""

    def __init__(self, device: str, cache: Path, scratch: Path, count: int) -> None:
        waiting = count + 1 if device.startswith("cuda") else 0  # the one is for what prepares the device, below
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close
        environment = child_python.environment() | {
            "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1"),
            # By default Inductor keeps code that it loads again under a name in /tmp that any user can guess.
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            # Its cache of graphs is made of pickles; every piece here is compiled once anyway.
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
            # Looks for a GPU without initialising CUDA, which would not survive a fork.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # Compilers that are killed leave what they had written: it goes with the compile's own folder.
            "TMPDIR": str(scratch),
            **bytecode.environment(),
        }
        self._process = ProcessGroup(
            [*_COMMAND, device, str(scratch), str(waiting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._jobs = itertools.count()
        self._writing, self._lock = threading.Lock(), threading.Lock()
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._end: dict[str, Any] | None = None  # the answer to everything, once the process has ended
        self._reader = threading.Thread(target=self._read, name="pieces-reader", daemon=True)
        self._reader.start()
        self.ask({"prepare": True, "device": device})  # not waited for

    def ask(self, request: dict[str, Any]) -> Future[dict[str, Any]]:
        """A future of the answer, which has an "error" if something went wrong."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            job = next(self._jobs)
            if self._end is not None:
                future.set_result(self._end)
                return future
            self._asked[job] = future
        with self._writing, contextlib.suppress(BrokenPipeError):
            print(json.dumps(request | {"job": job}), file=self._process.stdin, flush=True)
        return future

    def _read(self) -> None:
        """Runs in a thread of its own, until the process ends."""
        for line in self._process.stdout or ():
            if not line.endswith("\n"):
                break  # killed while it wrote
            answer = json.loads(line)
            with self._lock:
                future = self._asked.pop(answer["job"])
            future.set_result(answer)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill_group()  # forks of a process that was killed alone
        self._log.seek(0)
        last_lines = " | ".join(self._log.read().strip().splitlines()[-3:])
        end = {"error": f"the compiler process ended (exit code {self._process.poll()}): {last_lines}"}
        with self._lock:
            self._end = end
            waiting, self._asked = self._asked, {}
        for future in waiting.values():
            future.set_result(end)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process and its forks, which hold nothing that is needed."""
        if self.is_running:
            self._process.kill_group()

    def close(self) -> None:
        """Waits for the process' end and closes its pipes."""
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
