"""A gloo group that a trainer and this engine join, the engine by a process of its own (gloo_process.py)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable

import torch

from mllm_compile.errors import MllmError, TransferError
from mllm_compile.process import child_python
from mllm_compile.transfer.gloo_process import MOST_BYTES, Joining
from mllm_compile.transfer.shared_memory import read_into

_START_S = 60.0  # for the process to import torch
_LATE_S = 10.0  # its own limits come first
_END_S = 5.0
_MOST_BYTES = 1 << 12  # of an answer
_ENDED = "it has sent more than it announced, or memory was short"


class GlooGroup:
    """A group that was joined; used by one thread at a time, which waits for a broadcast before it begins another.

    Raises:
        TransferError: not all members come, or the group's name is too long.
        MllmError: no process can be started.
    """

    def __init__(self, joining: Joining) -> None:
        self.device = torch.device("cpu")
        message = joining.to_bytes()
        if len(message) > MOST_BYTES:
            raise TransferError(
                f"the group's name has {len(joining.name or ''):,} characters; expected a few. Give it a shorter one"
            )
        self._silence_s = joining.silence_s
        self._file = os.memfd_create("weights")
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    child_python.command("mllm_compile.transfer.gloo_process", str(theirs.fileno())),
                    env=child_python.environment(),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                self._let_go()
                raise MllmError(f"no process can be started that joins a trainer's group: {error}.") from None
        self._link.send(message)
        if failure := self._failure(_START_S + joining.timeout_s, "its process ended"):
            self.close()
            raise TransferError(
                f"not all of {joining.world_size} members have joined at {joining.host}:{joining.port} within "
                f"{joining.timeout_s:g} s ({failure})"
            )

    def begin(self, tensor: torch.Tensor, src: int = 0) -> Callable[[], None]:
        """Begins to receive what member `src` broadcasts, for the tensor's memory, which the result fills.

        Raises:
            TransferError: the sender is gone or silent, or sends more or less than the tensor has.
        """
        num_bytes = tensor.nbytes
        message = json.dumps({"num_bytes": num_bytes, "src": src}).encode()
        try:
            os.ftruncate(self._file, num_bytes)
            socket.send_fds(self._link, [message], [self._file] if num_bytes else [])
        except OSError as error:
            raise self._silent(str(error)) from None

        def finish() -> None:
            if failure := self._failure(self._silence_s + _LATE_S, _ENDED):
                raise self._silent(failure)
            if num_bytes:
                read_into(self._file, 0, tensor.view(-1).view(torch.uint8))

        return finish

    def close(self) -> None:
        """Leaves the group, and ends its process."""
        self._let_go()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _let_go(self) -> None:
        self._link.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _failure(self, most_s: float, where_it_ended: str) -> str | None:
        """The process' next answer: None, or why it failed."""
        self._link.settimeout(most_s)
        try:
            answer = self._link.recv(_MOST_BYTES)
        except OSError as error:
            return str(error)
        failure: str | None = json.loads(answer)["error"] if answer else where_it_ended
        return failure

    def _silent(self, why: str) -> TransferError:
        return TransferError(f"the sender is gone, or silent for {self._silence_s:g} s ({why})")
