"""A communicator over gloo: ranks are processes, tensors are on a CPU.

torch's own process group, without torch.distributed's globals: a process may have engines of several groups.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from mllm_compile.runtime.collectives.base import sum_by_gather
from mllm_compile.runtime.collectives.plain import PlainCommunicator
from mllm_compile.runtime.collectives.stages import MOST_SENT
from mllm_compile.runtime.cuda.kernel import CudaKernel

_JOIN_TIMEOUT = timedelta(seconds=60)  # of milliseconds: a rank that was lost amid it never comes
_TIMEOUT = timedelta(days=1)  # a rank that hangs is seen by another way, and killed; a rank may be idle for long
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # sums of these are of float32


@contextmanager
def _told(call: str) -> Iterator[None]:
    """Says which call failed and why, without the line of gloo's source and the advice around it."""
    try:
        yield
    except RuntimeError as error:
        place, _, reason = str(error).partition("] ")
        reason = reason if place.startswith("[/") else str(error)
        raise RuntimeError(f"{call} over ranks failed: {reason.partition('. This is')[0]}") from None


def new_store(host: str) -> Any:
    """A store at an address of this host, by which ranks of several hosts find each other; its `port` is free."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_JOIN_TIMEOUT)


class GlooCommunicator(PlainCommunicator):
    """One rank of a group of processes, which find each other by a file, or a store."""

    def __init__(self, rank: int, size: int, place: int | str, host: str = "127.0.0.1") -> None:
        """Waits for the others.

        Args:
            place: the rank's own open descriptor of a file that is empty at first, the same for all ranks. It is the
                communicator's from now on: torch opens and writes the descriptor of this number while the group exists.
                Of ranks on several hosts the address HOST:PORT of a store (`new_store`).
            host: the rank's own address, at which the others find it.

        Raises:
            RuntimeError: another rank ended meanwhile, or did not come.
        """
        from torch._C._distributed_c10d import FileStore, TCPStore

        self._place = place if isinstance(place, int) else None
        self._host = host
        try:
            if isinstance(place, int):
                store: Any = FileStore(f"/proc/self/fd/{place}", size)
            else:
                name, _, port = place.rpartition(":")
                store = TCPStore(name, int(port), is_master=False, timeout=_JOIN_TIMEOUT)
            self._join(rank, size, store)
        except BaseException:
            self.close()
            raise

    _group: Any = None
    _store: Any = None
    _link: GlooLink | None = None

    def _join(self, rank: int, size: int, store: Any) -> None:
        from torch._C._distributed_c10d import ProcessGroupGloo

        self.rank, self.size, self._store = rank, size, store
        self._in_one_order = False
        gloo: Any = ProcessGroupGloo  # torch's stubs lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = _JOIN_TIMEOUT
        self._group = gloo(store, rank, size, options)
        self._group._set_default_timeout(_TIMEOUT)

    def part(self, name: str, ranks: Sequence[int]) -> GlooCommunicator | None:
        from torch._C._distributed_c10d import PrefixStore

        if self.rank not in ranks:
            return None
        part = GlooCommunicator.__new__(GlooCommunicator)
        part._place, part._host = None, self._host
        part._join(list(ranks).index(self.rank), len(ranks), PrefixStore(name, self._store))
        return part

    def link(self) -> GlooLink:
        self._link = GlooLink(self)
        return self._link

    def use_kernels(self, kernels: Collection[CudaKernel], in_one_order: bool = False) -> None:
        self._in_one_order = in_one_order and self.size > 2  # two numbers have one sum

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._in_one_order:
            return sum_by_gather(self, x)
        total = x.to(_WIDER.get(x.dtype, x.dtype), copy=True)
        if total.numel():
            with _told("a sum"):
                self._group.allreduce([total]).wait()
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        if x.numel():
            # As bytes: gloo does not know every type.
            parts = [part.view(torch.uint8) for part in gathered.view(self.size, -1)]
            with _told("a gather"):
                self._group.allgather([parts], [x.reshape(-1).view(torch.uint8)]).wait()
        return gathered

    def broadcast(self, x: torch.Tensor) -> None:
        with _told("a broadcast"):
            self._group.broadcast(x, 0).wait()

    def abort(self) -> None:
        """A wait ends by itself when the process that it waits for does."""

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._group = self._store = None  # it writes to the place that it ends
        place, self._place = self._place, None
        if place is not None:
            os.close(place)


class GlooLink:
    """The way between the two ranks of a group."""

    def __init__(self, group: GlooCommunicator) -> None:
        self._group, self._other = group, 1 - group.rank
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # gloo reads the memory until then

    def send(self, x: torch.Tensor) -> None:
        with _told("a value's way"):
            if len(self._sent) == MOST_SENT:
                self._sent.popleft()[0].wait()
            self._sent.append((self._group._group.send([_bytes_of(x)], self._other, 0), x))

    def receive(self, x: torch.Tensor) -> None:
        with _told("a value's way"):
            self._group._group.recv([_bytes_of(x)], self._other, 0).wait()

    def close(self) -> None:
        """Lets go of what was sent."""
        self._sent.clear()


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
