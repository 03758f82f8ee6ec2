"""The process with an engine, and this end of its channel. `serve` starts the first one beside its own imports.

Free of what a server imports. engine_link.py talks to it.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from mllm_compile.process import child_python, passage
from mllm_compile.process.group import ProcessGroup
from mllm_compile.process.passage import Passage
from mllm_compile.server.kept_memory import KeptMemory
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.spare import Descriptors, Program, Spare
from mllm_compile.server.wire.channel import Channel

_MODULE = "mllm_compile.server.backend.process"

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


def allow_open_files() -> None:
    """Lets this process, and those that it starts then, have as many open files as they may.

    Each connection is one, and 1,024 is a usual bound.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class EngineProcess:
    """A process with an engine, started now. It imports, and waits for its first command.

    Attributes:
        channel: this end of its channel.
        passage: this end of the way that its device's memory goes.
        process: the process, and all that it starts.

    Args:
        command_of: makes its command line of the number of a descriptor, its end of the channel.
        kept: memory that outlives it.
        environment: its variables, beside this process's.
        spare: a process that may become it; None: it is a new one.

    Raises:
        OSError: there is no room for a process.
    """

    def __init__(
        self,
        command_of: CommandLine,
        kept: KeptMemory,
        environment: Mapping[str, str],
        spare: Spare | None = None,
    ) -> None:
        self.passage, its_passage = Passage.pair()
        end, its_end = socket.socketpair()
        self.channel = Channel(end)

        def program(own: int, keeping: int, passing: int) -> tuple[Sequence[str], Mapping[str, str]]:
            variables = {**kept.environment(keeping), passage.VARIABLE: str(passing)}
            return command_of(str(own)), {**variables, **environment}

        try:
            with its_end, its_passage:
                self.process = _started(program, (its_end.fileno(), kept.descriptor, its_passage.fileno()), spare)
        except BaseException:
            self._close()
            raise

    def kill(self) -> None:
        """Ends the process and all that it has started, at once."""
        self.process.kill_group()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self.channel.close()
        self.passage.close()


def _started(program: Program, descriptors: Descriptors, spare: Spare | None) -> ProcessGroup:
    """A process with these descriptors: the spare one where that is ready, or else a new one."""
    process = None if spare is None else spare.take(program, descriptors)
    if process is not None:
        return process
    command, variables = program(*descriptors)
    return ProcessGroup(
        command,
        stdin=subprocess.DEVNULL,
        env={**child_python.environment(), **variables},
        pass_fds=descriptors,
    )


class EarlyEngine:
    """The first engine's process, which is started ahead of the server that takes it."""

    def __init__(self, options: ServeOptions) -> None:
        self._kept = KeptMemory()
        self._process: EngineProcess | None = None
        try:
            self._process = EngineProcess(command_line(options), self._kept, options.environment)
        except BaseException:
            self._kept.close()
            raise

    def take(self) -> tuple[EngineProcess, KeptMemory]:
        """The process and the memory that outlives it, which are the caller's now. Once.

        Raises:
            RuntimeError: they were taken before.
        """
        if self._process is None:
            raise RuntimeError("the engine that was started early is another's")
        process, self._process = self._process, None
        return process, self._kept

    def close(self) -> None:
        """Ends the process, if nobody has taken it."""
        if self._process is not None:
            self._process.kill()
            self._kept.close()


@contextmanager
def early_engine(options: ServeOptions) -> Iterator[EarlyEngine]:
    """Starts a server's engine, and ends it if no server takes it."""
    allow_open_files()
    early = EarlyEngine(options)
    try:
        yield early
    finally:
        early.close()
