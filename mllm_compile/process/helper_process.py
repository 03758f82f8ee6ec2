"""Processes that do for this one what may not end, or eat memory; they run helper_server.py.

A process starts with the first request, and is kept for the next ones; concurrent requests have one each, up to a
limit; further ones wait. Work that does not end costs its own process and its own request. Processes end with the
object that started them, and with this process.

A thread that asks a process reads its standard error meanwhile: a full pipe would stop it, without a limit on
processor time ever being met. The end of that is kept, for errors.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection
from pathlib import Path

from mllm_compile.errors import MllmError
from mllm_compile.process import bytecode, child_python
from mllm_compile.process.helper_server import FRAME, REQUEST, START, TERMS, Answer

_CHUNK = 1 << 20
_MOST_SAID = 1 << 14  # bytes that are kept of standard error
_END_S = 5.0  # between a process's last word and its end


class NoAnswer(Exception):
    """A process ended, or was silent, before it had answered.

    Attributes:
        why: a predicate of what it was to do: "takes more than 2 s of processor time".
        is_limit: a limit was exceeded; else the process was ended by something else, and may be asked again.
    """

    def __init__(self, why: str, is_limit: bool) -> None:
        super().__init__(why)
        self.why = why
        self.is_limit = is_limit


class HelperProcesses:
    """Processes that answer requests of one kind; from any thread, also after a fork.

    Args:
        module: its `main` calls helper_server.serve.
        start: the body of the START frame.
        task: what they do, for errors: "that renders chat templates".
        seconds: of processor time that a request may take.
        max_wait_s: of wall time that a request may take: one that sleeps takes no processor.
        max_start_s: of wall time that a process has for imports and preparation.
        max_answer: bytes.
        most: processes at a time.
        kept_after: kinds of answers after which a process serves others.
    """

    def __init__(
        self,
        module: str,
        start: bytes,
        *,
        task: str,
        seconds: float,
        max_wait_s: float,
        max_start_s: float,
        max_answer: int,
        most: int,
        kept_after: Collection[bytes],
    ) -> None:
        self._module, self._start, self._task = module, start, task
        self._seconds, self._max_wait_s, self._max_start_s = seconds, max_wait_s, max_start_s
        self._max_answer = max_answer
        self._most, self._kept_after = most, frozenset(kept_after)
        self._processes: set[_Process] = set()
        self._have_no_processes()
        weakref.finalize(self, _end_all, self._processes)
        _everyone.add(self)

    def _have_no_processes(self) -> None:
        self._lock = threading.Lock()  # of the idle ones
        self._idle: list[_Process] = []
        self._places = threading.BoundedSemaphore(self._most)

    def _after_fork(self) -> None:
        """Runs in the child: the processes are the parent's, and the locks may be held by threads that it lacks."""
        for process in self._processes:
            process.let_go()
        self._processes.clear()
        self._have_no_processes()

    def ask(self, request: bytes) -> Answer:
        """The answer to a request.

        Raises:
            NoAnswer: there was none.
            MllmError: no process can be started.
        """
        with self._places:
            process = self._take()
            try:
                process.get_ready(self._max_start_s)
                kind, answer = process.ask(request, self._max_wait_s, self._max_answer)
            except _Silent as silent:
                why, is_limit = self._why_no_answer(process, silent)
                self._end(process)
                raise NoAnswer(why, is_limit) from None
            except BaseException:  # after an interruption its answer would be taken for the next one's
                self._end(process)
                raise
            if kind in self._kept_after:
                with self._lock:
                    self._idle.append(process)
            else:
                self._end(process)
        return kind, answer

    def _take(self) -> _Process:
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                process = _Process(self._start, self._seconds)
                self._processes.add(process)  # before it has anything that a fork would inherit
                try:
                    process.start(self._module)
                except OSError as error:
                    self._end(process)
                    raise MllmError(f"no process can be started {self._task}: {error}.") from None
                except BaseException:
                    self._end(process)
                    raise
                return process
            if process.is_alive:
                return process
            self._end(process)  # another thread has ended it meanwhile

    def _end(self, process: _Process) -> None:
        self._processes.discard(process)
        process.end()

    def _why_no_answer(self, process: _Process, silent: _Silent) -> tuple[str, bool]:
        if not process.is_ready and silent.is_timeout:
            return f"has not begun: its process was not ready within {self._max_start_s:g} s", False
        if silent.is_timeout:
            return f"was not over after {self._max_wait_s:g} s", True
        code, said = process.last_words()
        if code == -signal.SIGPROF:
            return f"takes more than {self._seconds:g} s of processor time", True
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"gave no answer: its process ended ({how}){': ' + said if said else ''}", False


class _Silent(Exception):
    """There was no answer."""

    def __init__(self, is_timeout: bool) -> None:
        super().__init__()
        self.is_timeout = is_timeout


class _Process:
    """One process. For one thread at a time."""

    def __init__(self, start: bytes, seconds: float) -> None:
        self._start, self._seconds = start, seconds
        self._socket: socket.socket | None = None
        self._alive: int | None = None  # a pipe's end: the process ends when it is closed
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: int | None = None  # the descriptor, until the process closes its end
        self._said = bytearray()
        self.is_ready = False

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, module: str) -> None:
        """
        Raises:
            OSError: the system gives no process.
        """
        # The process has the modules of this one, wherever they come from, and of its own nothing to do before.
        folders = [*child_python.module_folders(), str(Path(__file__).parents[2])]
        self._socket, theirs = socket.socketpair()
        parent, self._alive = os.pipe()
        with theirs, open(parent, "rb", buffering=0), bytecode.kept_bytecode():
            run = f"import sys; sys.path[:] = sys.argv[1:]; {bytecode.preamble()}from {module} import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-c", run, *folders],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env=os.environ | bytecode.environment(),
                process_group=0,  # Ctrl-C in a terminal is for its parent
                pass_fds=(parent,),
            )
        self._start = TERMS.pack(self._seconds, parent) + self._start
        assert self._process.stderr is not None, "a pipe"
        self._stderr = self._process.stderr.fileno()
        os.set_blocking(self._stderr, False)
        self._socket.setblocking(False)

    def get_ready(self, max_start_s: float) -> None:
        """Waits until the process, if it is a new one, takes requests.

        Raises:
            _Silent: it has ended, or must end.
        """
        if not self.is_ready:
            self._exchange((START, self._start), time.monotonic() + max_start_s, 0)
            self.is_ready, self._start = True, b""

    def ask(self, request: bytes, max_wait_s: float, max_answer: int) -> Answer:
        """
        Raises:
            _Silent: no answer; the process has ended, or must end.
        """
        return self._exchange((REQUEST, request), time.monotonic() + max_wait_s, max_answer)

    def _exchange(self, message: Answer, deadline: float, max_answer: int) -> Answer:
        try:
            self._send(*message, deadline)
            kind, size = FRAME.unpack(self._receive(FRAME.size, deadline))
            if size > max_answer:
                raise ConnectionError
            return kind, self._receive(size, deadline)
        except (TimeoutError, ConnectionError) as error:
            raise _Silent(isinstance(error, TimeoutError)) from None

    def _send(self, kind: bytes, body: bytes, deadline: float) -> None:
        assert self._socket is not None, "started"
        rest = memoryview(FRAME.pack(kind, len(body)) + body)
        while rest:
            self._wait(select.POLLOUT, deadline)
            rest = rest[self._socket.send(rest[:_CHUNK]) :]

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self._socket is not None, "started"
        parts = []
        while size:
            self._wait(select.POLLIN, deadline)
            part = self._socket.recv(min(size, _CHUNK))
            if not part:
                raise ConnectionError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _wait(self, event: int, deadline: float) -> None:
        """Waits for the socket, and reads what the process says meanwhile.

        Raises:
            TimeoutError: it has not come by then.
        """
        assert self._socket is not None, "started"
        while (left := deadline - time.monotonic()) > 0:
            waits = select.poll()
            waits.register(self._socket, event)
            if self._stderr is not None:
                waits.register(self._stderr, select.POLLIN)
            ready = {number for number, _ in waits.poll(1000 * left)}
            if self._stderr in ready:
                self._hear()
            if self._socket.fileno() in ready:
                return
        raise TimeoutError

    def _hear(self) -> bool:
        """Takes a part of what the process has written to standard error; False: nothing more for now."""
        assert self._stderr is not None, "open"
        try:
            part = os.read(self._stderr, _MOST_SAID)
        except BlockingIOError:
            return False
        self._said += part
        del self._said[:-_MOST_SAID]
        if not part:  # it was closed
            self._stderr = None
        return bool(part)

    def last_words(self) -> tuple[int, str]:
        """Its exit code, and the last line that it wrote to standard error; its end is near, or is made."""
        assert self._process is not None, "started"
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it has closed its socket, or answers with too much
            self._process.kill()
            code = self._process.wait()
        while self._stderr is not None and self._hear():
            pass
        lines = self._said.decode(errors="replace").strip().splitlines()
        return code, lines[-1] if lines else ""

    def end(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.let_go()

    def let_go(self) -> None:
        """Forgets the process; it lives on for its other holders."""
        self._stderr = None
        if self._socket is not None:
            self._socket.close()
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None
        if self._process is not None:
            if self._process.stderr is not None:
                self._process.stderr.close()
            self._process.returncode = self._process.returncode or 0  # a fork cannot wait for it


def _end_all(processes: set[_Process]) -> None:
    for process in tuple(processes):
        process.end()


# The processes of this one: a fork has the objects, and not the processes.
_everyone: weakref.WeakSet[HelperProcesses] = weakref.WeakSet()


def _after_fork() -> None:
    for processes in tuple(_everyone):
        processes._after_fork()


os.register_at_fork(after_in_child=_after_fork)
