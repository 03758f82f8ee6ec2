"""Renders chat templates in processes that can be ended; they run template_server.py.

A process starts with the first chat, in about a twentieth of a second, and is kept for the next ones; concurrent
renders have one each, up to a limit; further ones wait. A template that does not end, or eats memory, costs
its own process and its own request. Processes end with the object that started them, and with this process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mllm_compile.errors import MllmError, RequestError
from mllm_compile.process import bytecode
from mllm_compile.text.template_protocol import (
    FRAME,
    MAX_ANSWER,
    MAX_CHARACTERS,
    MAX_MEMORY,
    MAX_REQUEST,
    MAX_SECONDS,
    REFUSAL,
    REQUEST,
    TEMPLATES,
    TEXT,
    TOO_LONG,
    TOO_MUCH_MEMORY,
)

_MOST_PROCESSES = 4
_MAX_WAIT_S = 60  # where a process gets no processor: what it does is limited by the processor time that it takes
_CHUNK = 1 << 20
_ADVICE = "Shorten the messages, correct the model's chat template, or pass the prompt as text."
# The process has the modules of this one, wherever they come from, and of its own nothing to do before.
_COMMAND = (
    "-S", "-s", "-P", "-c",
    "import sys; sys.path[:] = sys.argv[1:]; from mllm_compile.text.template_server import main; main()",
)  # fmt: skip


class TemplateProcesses:
    """Renders the templates of one model; from any thread, also after a fork.

    Args:
        sources: name → Jinja source.
        special_tokens: bos_token, eos_token, … as templates name them.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = json.dumps({"sources": dict(sources), "special_tokens": dict(special_tokens)}).encode()
        self._processes: set[_Process] = set()
        self._have_no_processes()
        weakref.finalize(self, _end_all, self._processes)
        _everyone.add(self)

    def _have_no_processes(self) -> None:
        self._lock = threading.Lock()  # of the idle ones
        self._idle: list[_Process] = []
        self._places = threading.BoundedSemaphore(_MOST_PROCESSES)

    def _after_fork(self) -> None:
        """Runs in the child: the processes are the parent's, and the locks may be held by threads that it lacks."""
        for process in self._processes:
            process.let_go()
        self._processes.clear()
        self._have_no_processes()

    def render(self, request: Mapping[str, Any]) -> str:
        """The prompt's text.

        Args:
            request: keyword arguments of `template_server.Templates.render`, plain JSON.

        Raises:
            RequestError: the template fails, refuses, or exceeds a limit; or the request is none of plain JSON.
            MllmError: no process can be started.
        """
        try:
            body = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"chat messages, tools and variables must be plain JSON data (tools as JSON schemas): {error}."
            ) from None
        if len(body) > MAX_REQUEST:
            raise RequestError(
                f"the chat is {len(body)} bytes as JSON; expected at most {MAX_REQUEST}. Shorten the messages."
            )
        with self._places:
            process = self._take()
            try:
                kind, answer = process.ask(body)
            except BaseException:  # after an interruption its answer would be taken for the next one's
                self._end(process)
                raise
            if kind in (TEXT, REFUSAL):
                with self._lock:
                    self._idle.append(process)
            else:
                self._end(process)
        text = answer.decode("utf-8", "surrogatepass")
        if kind == TEXT:
            return text
        limit = {
            TOO_MUCH_MEMORY: f"needs more than {MAX_MEMORY >> 20} MiB of memory for these messages",
            TOO_LONG: f"makes more than {MAX_CHARACTERS} characters of these messages",
        }.get(kind)
        raise RequestError(text if limit is None else f"the model's chat template {limit}, the most it may. {_ADVICE}")

    def _take(self) -> _Process:
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                process = _Process(self._templates)
                self._processes.add(process)  # before it has anything that a fork would inherit
                try:
                    process.start()
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


class _Process:
    """One process. For one thread at a time."""

    def __init__(self, templates: bytes) -> None:
        self._unsent = [(TEMPLATES, templates)]
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """
        Raises:
            MllmError: the system gives no process.
        """
        folders = [os.path.abspath(folder) for folder in sys.path] + [str(Path(__file__).parents[2])]
        self._socket, theirs = socket.socketpair()
        try:
            with theirs, bytecode.kept_bytecode():
                self._process = subprocess.Popen(
                    [sys.executable, *_COMMAND, *folders],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env=os.environ | bytecode.environment(),
                    process_group=0,  # Ctrl-C in a terminal is for its parent
                )
        except OSError as error:
            raise MllmError(f"no process can be started that renders chat templates: {error}.") from None

    def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """The process's answer, of the kinds in template_protocol.py.

        Raises:
            RequestError: there was none; the process has ended.
        """
        deadline = time.monotonic() + _MAX_WAIT_S
        self._unsent.append((REQUEST, request))
        try:
            while self._unsent:
                self._send(*self._unsent.pop(0), deadline)
            kind, size = FRAME.unpack(self._receive(FRAME.size, deadline))
            if size > MAX_ANSWER:
                raise ConnectionError
            return kind, self._receive(size, deadline)
        except (TimeoutError, ConnectionError) as error:
            raise RequestError(f"the model's chat template {self._why_no_answer(error)}") from None

    def _send(self, kind: bytes, body: bytes, deadline: float) -> None:
        assert self._socket is not None, "started"
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        self._socket.sendall(FRAME.pack(kind, len(body)) + body)

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self._socket is not None, "started"
        parts = []
        while size:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._socket.recv(min(size, _CHUNK))
            if not part:
                raise ConnectionError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _why_no_answer(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return f"had not made a prompt of these messages after {_MAX_WAIT_S} s. {_ADVICE}"
        assert self._process is not None and self._process.stderr is not None, "started"
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return f"takes more than {MAX_SECONDS} s of processor time for these messages, the most it may. {_ADVICE}"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return f"was not rendered, its process ended ({how}){': ' + said[-1] if said else ''}. Ask again."

    def end(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.let_go()

    def let_go(self) -> None:
        """Forgets the process, which then lives on for those who hold it too."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            if self._process.stderr is not None:
                self._process.stderr.close()
            self._process.returncode = self._process.returncode or 0  # a fork cannot wait for it


def _end_all(processes: set[_Process]) -> None:
    for process in tuple(processes):
        process.end()


# The processes of this one: a fork has the objects, and not the processes.
_everyone: weakref.WeakSet[TemplateProcesses] = weakref.WeakSet()


def _after_fork() -> None:
    for processes in tuple(_everyone):
        processes._after_fork()


os.register_at_fork(after_in_child=_after_fork)
