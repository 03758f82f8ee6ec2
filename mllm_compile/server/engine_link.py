"""One process with an engine, as the front sees it: its frames, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from mllm_compile.server.engine_process import EngineProcess
from mllm_compile.server.wire import messages
from mllm_compile.server.wire.messages import Close, Command, EngineEvent

_COMMANDS_AT_ONCE = 16  # about a step's prompts: the engine begins with them while the next ones are read
_CLOSE_S = 10.0  # to end a step, and give the memory back


class EngineLink:
    """A process with an engine, whose owner it is from now on; for one event loop.

    Args:
        on_step: takes the frames of steps.
        on_event: takes all else that it tells.

    Attributes:
        passage: the way of its device's memory, until it is killed.
    """

    def __init__(
        self, started: EngineProcess, on_step: Callable[[bytes], None], on_event: Callable[[EngineEvent], None]
    ) -> None:
        self._started = started
        self._channel, self._process = started.channel, started.process
        self.passage = started.passage
        self._on_step = on_step
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self.exited = asyncio.Event()
        self._is_over = False
        self._unsent: list[Command] = []
        self._loop.add_reader(self._channel.fileno(), self._read)
        self._exit = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._exit, self._exited)

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
            self._channel.send(messages.encode_commands(commands))

    def _read(self) -> bool:
        """Takes the frames that have come; False: there was none."""
        frames = self._channel.read()
        if self._channel.is_over:
            self._loop.remove_reader(self._channel.fileno())
        for frame in frames:
            event = messages.decode_event(frame)
            if event is None:
                self._on_step(frame)
            else:
                self._on_event(event)
        return bool(frames)

    def _exited(self) -> None:
        self._loop.remove_reader(self._exit)
        while self._read():
            pass
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
        self._loop.remove_reader(self._channel.fileno())
        self._started.kill()
        if not self.exited.is_set():
            self._loop.remove_reader(self._exit)
            self.exited.set()
        os.close(self._exit)
