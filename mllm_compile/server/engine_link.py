"""One process with an engine, as the front sees it: its channel, its frames, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

from mllm_compile.process import child_python
from mllm_compile.process.group import ProcessGroup
from mllm_compile.server.kept_memory import KeptMemory
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.wire import messages
from mllm_compile.server.wire.channel import Channel
from mllm_compile.server.wire.messages import Close, Command, EngineEvent

_MODULE = "mllm_compile.server.backend.process"
_COMMANDS_AT_ONCE = 16  # about a step's prompts: the engine begins with them while the next ones are read
_CLOSE_S = 10.0  # to end a step, and give the memory back

CommandLine = Callable[[str], Sequence[str]]


def command_line(options: ServeOptions) -> CommandLine:
    """The command that serves a model to a channel's descriptor."""
    given = (
        options.speculative or "",
        json.dumps(options.lora),
        json.dumps(dict(options.runtime)),
        options.name_in_log,
    )
    return lambda descriptor: child_python.command(_MODULE, options.model, descriptor, options.how, options.log, *given)


class EngineLink:
    """A process with an engine, started now; for one event loop.

    Args:
        command_of: makes its command line of the number of a descriptor, its end of the channel.
        on_step: takes the frames of steps.
        on_event: takes all else that it tells.
        kept: memory that outlives it.
        environment: its variables, beside this process's.
    """

    def __init__(
        self,
        command_of: CommandLine,
        on_step: Callable[[bytes], None],
        on_event: Callable[[EngineEvent], None],
        kept: KeptMemory,
        environment: Mapping[str, str],
    ) -> None:
        self._on_step = on_step
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self.exited = asyncio.Event()
        self._is_over = False
        self._unsent: list[Command] = []
        end, its_end = socket.socketpair()
        self._channel = Channel(end)
        try:
            with its_end:
                descriptor = its_end.fileno()
                command = command_of(str(descriptor))
                self._process = ProcessGroup(
                    command,
                    stdin=subprocess.DEVNULL,
                    env={**child_python.environment(), **kept.environment, **environment},
                    pass_fds=[descriptor, kept.descriptor],
                )
        except BaseException:
            self._channel.close()
            raise
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
        self._process.kill_group()
        self._process.wait()
        self._loop.remove_reader(self._channel.fileno())
        if not self.exited.is_set():
            self._loop.remove_reader(self._exit)
            self.exited.set()
        os.close(self._exit)
        self._channel.close()
