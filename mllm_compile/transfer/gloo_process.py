"""The engine's member of a trainer's gloo group, in a process of its own: gloo ends its process where another member
sends more than is received.

Messages are JSON over a socket: one that joins, then one for each broadcast, with a file of memory that it fills. Each
has an answer. The process ends with its first error, and with the engine.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import socket
import sys
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

MOST_BYTES = 1 << 16  # of a message
_MARK_BYTES = 8
_TOO_LITTLE = "it has sent less than it announced"


@dataclass(frozen=True)
class Joining:
    """The arguments of group.join that concern the process."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
    silence_s: float
    name: str | None

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self)).encode()


def main() -> None:
    """Serves the socket whose number is the argument."""
    link = socket.socket(fileno=int(sys.argv[1]))
    asked: queue.SimpleQueue[tuple[Any, list[int]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, asked), daemon=True).start()
    joining = Joining(**asked.get()[0])
    try:
        group = _joined(joining)
        _answer(link)
        while True:
            fields, files = asked.get()
            _receive(group, fields["num_bytes"], fields["src"], timedelta(seconds=joining.silence_s), files)
            _answer(link)
    except (RuntimeError, dist.DistError, OSError, MemoryError) as error:
        _answer(link, first_line(error))
    os._exit(0)  # gloo may write to memory that is waited for no more


def _listen(link: socket.socket, asked: queue.SimpleQueue[tuple[Any, list[int]]]) -> None:
    while True:
        try:
            message, files, _, _ = socket.recv_fds(link, MOST_BYTES, 1)
        except ConnectionError:  # it has ended ahead of reading an answer
            message, files = b"", []
        if not message:
            os._exit(0)  # the engine has left, or has ended
        asked.put((json.loads(message), files))


def _answer(link: socket.socket, error: str | None = None) -> None:
    link.send(json.dumps({"error": error}).encode())


def _joined(joining: Joining) -> Any:
    wait = timedelta(seconds=joining.timeout_s)
    store = TCPStore(joining.host, joining.port, joining.world_size, is_master=False, timeout=wait)
    prefixed = PrefixStore("weights", store) if joining.name is None else named_store(store, joining.name, "cpu")
    group: Any = ProcessGroupGloo(prefixed, joining.rank, joining.world_size, wait)
    if joining.name is None:
        group.allreduce([torch.zeros(1)]).wait(wait)
    return group


def named_store(store: Any, name: str, device: str) -> Any:
    """The store as torch's named groups see it: a prefix of the name, of the backend's device, and of the name."""
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


def _receive(group: Any, num_bytes: int, src: int, wait: timedelta, files: list[int]) -> None:
    """Fills a file's memory.

    Raises:
        RuntimeError: the sender is gone, silent, or has sent less.
    """
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = src, 0, wait
    if not num_bytes:
        group.broadcast([torch.empty(0, dtype=torch.uint8)], options).wait(wait)
        return
    (file,) = files
    with mmap.mmap(file, num_bytes) as memory:
        os.close(file)
        mark = os.urandom(_MARK_BYTES) if num_bytes >= _MARK_BYTES else b""  # gloo takes a shorter message silently
        memory[num_bytes - len(mark) :] = mark
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        group.broadcast([tensor], options).wait(wait)
        del tensor
        if mark and memory[-_MARK_BYTES:] == mark:
            raise RuntimeError(_TOO_LITTLE)


def first_line(error: BaseException) -> str:
    """The error's text, short."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


if __name__ == "__main__":
    main()
