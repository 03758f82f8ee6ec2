"""Values over NIXL: a decode engine reads the prefill engine's memory, by RDMA where the hosts have it, else by TCP.

Both ends know each other from the meeting, which sends what NIXL has to know with its MAC. A value is read into memory
of this file's own, and copied: a read that was given up may end late, when its slot has another content. After any
failure the agent goes with that memory, and the next read makes new ones.

NIXL is NVIDIA's library that vLLM and Dynamo hand pages over by (the extra `nixl`). It is imported here alone.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_STAGED = 64 << 20  # bytes that are read at once
_MOST_KNOWN = 256  # engines
_LEAST_POLL_S, _MOST_POLL_S = 20e-6, 1e-3


class Lent(NamedTuple):
    """Memory that can be read.

    Attributes:
        agent: what NIXL has to know of its agent, base64.
        address: where it begins there.
    """

    agent: str
    address: int


class BusyError(Exception):
    """Nothing was read, for a reason other than the engine that was to be read."""


class NixlLender:
    """The end that lends.

    Args:
        memory: [bytes] uint8, which stays where it is.

    Attributes:
        lent: what others need to read it.

    Raises:
        OSError: NIXL has no way to other hosts here.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self._agent: Any = _Agent()
        self._memory = memory
        self._agent.register(memory)
        self.lent = Lent(self._agent.told(), int(memory.ctypes.data))

    def close(self) -> None:
        """Lends no more: reads that are on their way fail."""
        self._agent = None


class NixlReader:
    """The end that reads; several threads call it at once.

    Args:
        most_bytes: of a value.

    Raises:
        OSError: NIXL has no way to other hosts here.
    """

    def __init__(self, most_bytes: int) -> None:
        self._size = max(_STAGED, most_bytes)
        self._lock = threading.Lock()
        self._agent: _Agent | None = None
        self._staged = np.empty(0, np.uint8)
        self._known: OrderedDict[str, str] = OrderedDict()  # names of other agents, by what they have told
        self._make()

    def read(self, lent: Lent, values: Sequence[tuple[int, memoryview]], until: float) -> None:
        """Fills buffers from their offsets in another engine's memory; until time.monotonic() is `until`.

        Raises:
            BusyError: other reads took all that time.
            OSError: they were not all read.
        """
        if not values:
            return
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise BusyError("reads from other engines took all of the time")
        try:
            failure = self._failure(lent, values, until)
            if failure is not None:
                self._forget()
        finally:
            self._lock.release()
        if failure is not None:
            raise failure

    def _failure(self, lent: Lent, values: Sequence[tuple[int, memoryview]], until: float) -> Exception | None:
        """Reads; gives an error without its frames, which would keep the agent for longer than its memory."""
        try:
            while values:
                count, size = 0, 0
                while count < len(values) and size + len(values[count][1]) <= self._size:
                    size += len(values[count][1])
                    count += 1
                if not count:
                    raise ValueError(f"a value of more than {self._size} bytes")
                self._read(lent, values[:count], until)
                values = values[count:]
        except (OSError, ValueError) as error:
            return type(error)(str(error))
        return None

    def close(self) -> None:
        """Ends; no call is on its way."""
        self._forget()

    def _forget(self) -> None:
        self._agent = None  # ahead of its memory, to which its thread writes
        self._staged = np.empty(0, np.uint8)
        self._known.clear()

    def _make(self) -> _Agent:
        self._staged = np.empty(self._size, np.uint8)
        agent = self._agent = _Agent()
        agent.register(self._staged)
        return agent

    def _read(self, lent: Lent, values: Sequence[tuple[int, memoryview]], until: float) -> None:
        agent = self._agent or self._make()
        name = self._known.get(lent.agent)
        if name is not None:
            self._known.move_to_end(lent.agent)
        else:
            name = self._known[lent.agent] = agent.meet(lent.agent)
            if len(self._known) > _MOST_KNOWN:
                agent.forget(self._known.popitem(last=False)[1])
        own, others, at = [], [], 0
        begin = int(self._staged.ctypes.data)
        for offset, buffer in values:
            own.append((begin + at, len(buffer), 0))
            others.append((lent.address + offset, len(buffer), 0))
            at += len(buffer)
        agent.read(own, others, name, until)
        at = 0
        for _, buffer in values:
            np.frombuffer(buffer, dtype=np.uint8)[:] = self._staged[at : at + len(buffer)]
            at += len(buffer)


class _Agent:
    """NIXL's agent, whose errors are OSErrors here."""

    def __init__(self) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            logging.getLogger("nixl").setLevel(logging.WARNING)
            self._agent: Any = nixl_agent(f"mllm-{secrets.token_hex(16)}", nixl_agent_config(backends=["UCX"]))
        except Exception as error:  # of a library that is loaded, and of its own classes
            raise _failed("cannot be used here", error) from error
        if "UCX" not in self._agent.backends:
            raise OSError("NIXL cannot be used here: it has no UCX")

    def register(self, memory: np.ndarray) -> None:
        """Makes memory known, from which is read and to which."""
        try:
            self._agent.register_memory([(int(memory.ctypes.data), memory.nbytes, 0, "")], "DRAM")
        except Exception as error:
            raise _failed(f"does not take {memory.nbytes} bytes of memory", error) from error

    def told(self) -> str:
        """The words by which others know it, base64."""
        return base64.b64encode(self._agent.get_agent_metadata()).decode("ascii")

    def meet(self, told: str) -> str:
        """The name of another agent, by what it has told."""
        try:
            name = self._agent.add_remote_agent(base64.b64decode(told, validate=True))
        except Exception as error:
            raise _failed("does not know the other end", error) from error
        return str(name.decode() if isinstance(name, bytes) else name)

    def forget(self, name: str) -> None:
        """Forgets another agent."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            raise _failed("does not forget an end", error) from error

    def read(
        self, own: list[tuple[int, int, int]], others: list[tuple[int, int, int]], name: str, until: float
    ) -> None:
        """Reads ranges of another agent's memory, as (address, bytes, 0), to as many of its own."""
        agent, pause_s = self._agent, _LEAST_POLL_S
        try:
            here, there = (agent.get_xfer_descs(ranges, "DRAM") for ranges in (own, others))
            handle = agent.initialize_xfer("READ", here, there, name)
            state = agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > until:
                    raise TimeoutError("timed out")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise OSError(f"NIXL has read nothing: {state}")
            agent.release_xfer_handle(handle)
        except OSError:
            raise
        except Exception as error:
            raise _failed("has read nothing", error) from error


def _failed(what: str, error: Exception) -> OSError:
    return OSError(f"NIXL {what}: {type(error).__name__}: {error}")
