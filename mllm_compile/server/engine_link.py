"""One process with an engine, as the front sees it: its sockets, its frames, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from mllm_compile.process.group import ProcessGroup
from mllm_compile.server.wire import messages
from mllm_compile.server.wire.messages import Close, Command, Tiding

_MODULE = "mllm_compile.server.backend.process"
_FRAMES_AT_ONCE = 64
_COMMANDS_AT_ONCE = 16  # about a step's prompts: the engine begins with them while the next ones are read
_LONGEST_TMPDIR = 70
_CLOSE_S = 10.0  # to end a step, and give the memory back

CommandLine = Callable[[str, str], Sequence[str]]


def command_line(model: str, how: str, log: str) -> CommandLine:
    """The command that serves a model to sockets at two addresses; `how` and `log` as in ServeOptions."""
    return lambda commands, tidings: [sys.executable, "-P", "-m", _MODULE, model, commands, tidings, how, log]


class EngineLink:
    """A process with an engine, started now; for one event loop.

    Args:
        command_of: makes its command line of the addresses of commands and tidings.
        on_step: takes the frames of steps.
        on_tiding: takes all else that it tells.
    """

    def __init__(
        self, command_of: CommandLine, on_step: Callable[[bytes], None], on_tiding: Callable[[Tiding], None]
    ) -> None:
        self._on_step = on_step
        self._on_tiding = on_tiding
        self._loop = asyncio.get_running_loop()
        self.exited = asyncio.Event()
        self._is_over = False
        self._unsent: list[Command] = []
        self._folder = _socket_folder()
        self._context = zmq.Context()
        try:
            self._commands = self._socket(zmq.PUSH, "commands")
            self._tidings = self._socket(zmq.PULL, "tidings")
            addresses = [f"ipc://{self._folder}/{name}" for name in ("commands", "tidings")]
            self._process = ProcessGroup(command_of(*addresses), stdin=subprocess.DEVNULL, env=_environment())
        except BaseException:
            self._let_go()
            raise
        self._descriptor: int = self._tidings.FD
        self._loop.add_reader(self._descriptor, self._read)
        self._exit = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._exit, self._exited)
        self._read()

    def _socket(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(f"ipc://{self._folder}/{name}")
        return socket

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def send(self, command: Command) -> None:
        """Sends a command, with those that this round of the event loop has for it: many requests wake it once.

        One to a process that has ended is dropped.
        """
        if not self._unsent:
            self._loop.call_soon(self._send_all)
        self._unsent.append(command)
        if len(self._unsent) == _COMMANDS_AT_ONCE:
            self._send_all()

    def _send_all(self) -> None:
        commands, self._unsent = self._unsent, []
        if commands:
            with contextlib.suppress(zmq.ZMQError):
                self._commands.send(messages.encode_commands(commands), zmq.NOBLOCK)

    def _read(self) -> None:
        """Takes the frames that are there. The descriptor tells of the first one alone, so all are taken."""
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frame = self._tidings.recv(zmq.NOBLOCK)
            except zmq.ZMQError:  # none is left, or the socket is closed
                return
            tiding = messages.decode_tiding(frame)
            if tiding is None:
                self._on_step(frame)
            else:
                self._on_tiding(tiding)
        self._loop.call_soon(self._read)

    def _exited(self) -> None:
        self._loop.remove_reader(self._exit)
        self._read()
        self._process.poll()
        self.exited.set()

    async def close(self) -> None:
        """Ends a ready engine's process, which gives back what it holds; kills it where that takes long."""
        self.send(Close())
        await self._end()

    async def interrupt(self) -> None:
        """Ends a process that starts; what it was compiling removes its temporary files."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._end()

    async def _end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self.exited.wait()
        self.kill()

    def kill(self) -> None:
        """Ends the process and all that it has started, at once."""
        if self._is_over:
            return
        self._is_over = True
        self._process.kill_group()
        self._process.wait()
        self._loop.remove_reader(self._descriptor)
        if not self.exited.is_set():
            self._loop.remove_reader(self._exit)
            self.exited.set()
        os.close(self._exit)
        self._let_go()

    def _let_go(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _socket_folder() -> str:
    """A new folder that this user alone may enter; a socket's path has at most 107 bytes."""
    is_short = len(os.fsencode(tempfile.gettempdir())) < _LONGEST_TMPDIR
    return tempfile.mkdtemp(prefix="mllm-serve-", dir=None if is_short else "/tmp")


def _environment() -> dict[str, str]:
    """The process finds the modules of this one, wherever they come from."""
    folders = [str(Path(folder).absolute()) for folder in sys.path if folder]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
